"""What clients may send: every field is honoured, refused by name, or warned of once."""

import logging
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_jax.request import SamplingParams
from dflash_jax.serve.errors import ApiError

logger = logging.getLogger(__name__)

MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_IDS = 64, 1024, 1024
MAX_WARNINGS = 100  # field names come from clients; the log must not grow with them

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "return_logprob": (False,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "continuous_usage_stats": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "regex": (),
    "json_schema": (),
    "ebnf": (),
    "structural_tag": (),
    "custom_params": (),
    "custom_logit_processor": (),
    "logits_processors": ([],),
    "lora_path": (),
    "image_data": (),
    "audio": (),
    "modalities": (["text"],),
    "input_embeds": (),
    "prompt_embeds": (),
}
"""Fields that would change the output and are not honoured yet, with the values (besides null)
that ask for nothing."""

NO_EFFECT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "parallel_tool_calls", "spaces_between_special_tokens", "priority", "include_obfuscation",
    }
)  # fmt: skip
"""Fields that change nothing here and are passed over silently."""

RequestId = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]
# One wrong item is enough: a million error records would cost more than the request.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
_warned: set[str] = set()


class Body(BaseModel):
    """Types are strict: "8" is no number and true is no count."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", strict=True, frozen=True)

    def model_post_init(self, _context: Any) -> None:
        for name, value in (self.__pydantic_extra__ or {}).items():
            if name in NEUTRAL:
                if value is not None and not _is_neutral(value, NEUTRAL[name]):
                    raise ApiError(
                        400, f"{name} is not supported yet; leave it out", param=name,
                        code="unsupported_parameter",
                    )  # fmt: skip
            elif name not in NO_EFFECT and name not in _warned and len(_warned) < MAX_WARNINGS:
                _warned.add(name)
                logger.warning("unknown field %.80r of a request is ignored", name)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(type(value) is type(n) and value == n for n in neutral)


class Sampling(Body):
    """The sampling fields that every endpoint shares. None: the model's default, then OpenAI's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises ApiError on too many, too long or empty ones."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS:
            raise ApiError(400, f"{len(stops)} stop strings; accepted: {MAX_STOPS}", param="stop")
        if any(not 1 <= len(s) <= MAX_STOP_LENGTH for s in stops):
            raise ApiError(
                400, f"a stop string must have 1 to {MAX_STOP_LENGTH} characters", param="stop"
            )
        return stops

    def params(
        self, *, max_tokens: int, seed: int | None, defaults: dict[str, Any], name: str
    ) -> SamplingParams:
        """Raises ApiError naming the field; ``name`` is what this endpoint calls max_tokens."""

        def pick(field: str, fallback: float | int) -> Any:
            value = getattr(self, field)
            return defaults.get(field, fallback) if value is None else value

        greedy = defaults.get("do_sample") is False  # then its temperature is not in use
        temperature = 0.0 if greedy and self.temperature is None else pick("temperature", 1.0)
        ids = tuple(self.stop_token_ids or ())
        if len(ids) > MAX_STOP_IDS:
            raise ApiError(
                400, f"{len(ids)} stop_token_ids; accepted: {MAX_STOP_IDS}", param="stop_token_ids"
            )
        try:
            return SamplingParams(
                temperature=temperature,
                top_p=pick("top_p", 1.0),
                top_k=pick("top_k", 0),
                min_p=pick("min_p", 0.0),
                seed=seed,
                max_new_tokens=max_tokens,
                stop_token_ids=ids,
                ignore_eos=bool(self.ignore_eos),
            )
        except ValueError as error:
            message = str(error).replace("max_new_tokens", name)
            raise ApiError(400, message, param=message.split()[0]) from error


class StreamOptions(Body):
    include_usage: bool | None = None


class OpenAIRequest(Sampling):
    model: str | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    request_id: RequestId | None = None

    @property
    def wants_usage(self) -> bool:
        """Raises ApiError where stream_options comes without stream, as OpenAI does."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options goes with stream: true only", param="stream_options"
            )
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(Body):
    type: str
    text: str | None = None


class Message(Body):
    """Further fields (name, ...) reach the chat template as they are."""

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def for_template(self) -> dict[str, Any]:
        """Text parts joined by line breaks. Raises ApiError on parts that are not text."""
        content = self.content
        if not isinstance(content, str):
            for part in content:
                if part.type != "text" or part.text is None:
                    raise ApiError(
                        400, f"content part {part.type!r} is not supported; accepted: text",
                        param="messages",
                    )  # fmt: skip
            content = "\n".join(part.text or "" for part in content)
        return {**(self.__pydantic_extra__ or {}), "role": self.role, "content": content}

    def model_post_init(self, _context: Any) -> None:
        """Nothing to refuse: a message's further fields are the template's."""


class ChatRequest(OpenAIRequest):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(OpenAIRequest):
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]


class NativeSampling(Sampling):
    max_new_tokens: int | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool | None = None


class NativeRequest(Body):
    """SGLang's /generate."""

    text: str | Texts | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    rid: RequestId | None = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class AbortRequest(Body):
    """``request_id``, or ``rid`` as SGLang has it: the id of an answer, streamed or asked for."""

    request_id: str | None = None
    rid: str | None = None
    abort_all: bool | None = None


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Raises ApiError 400 on what is not JSON, or names the field that is wrong."""
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{path}: {first['msg']}", param=str(first["loc"][0])) from error
