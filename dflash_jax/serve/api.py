"""The endpoints: OpenAI's, SGLang's /generate, and what operators ask."""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import jax
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from dflash_jax import __version__
from dflash_jax.request import Request, SamplingParams
from dflash_jax.serve.answers import Answer, deltas
from dflash_jax.serve.async_engine import AsyncEngine, Submission
from dflash_jax.serve.errors import ApiError
from dflash_jax.serve.metrics import Metrics
from dflash_jax.serve.prompts import encode, render_chat
from dflash_jax.serve.protocol import (
    AbortRequest,
    AnyBody,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    NativeRequest,
    NativeSampling,
    OpenAIRequest,
    Sampling,
    TokenizeRequest,
    parse,
)
from dflash_jax.serve.responses import (
    EventStream,
    OpenAIShape,
    native,
    native_events,
    unless_disconnected,
)
from dflash_jax.text import TextStream
from dflash_jax.tokenizer import PreTrainedTokenizerFast

GONE = 499  # nobody reads it: the client has left


@dataclasses.dataclass(frozen=True)
class ApiConfig:
    """``model_name`` None: the model's own. ``info``: what /server_info shows."""

    model_name: str | None = None
    api_key: str | None = None
    max_request_bytes: int = 8 * 2**20
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


def _answer_of(request_id: str) -> str:
    """The prompts of one answer are requests of their own, "<answer>/<n>"; a client's own id has
    no slash."""
    return request_id.partition("/")[0]


class Api:
    """The endpoints."""

    def __init__(self, engine: AsyncEngine, metrics: Metrics, config: ApiConfig):
        self._engine, self._metrics, self._config = engine, metrics, config
        self._created = int(time.time())

    # Generation

    async def chat(self, http: HttpRequest) -> Response:
        body = await self._read(http, ChatRequest)
        tokenizer = self._check(body.model)

        def prompt() -> tuple[int, ...]:
            add = body.add_generation_prompt is not False
            kwargs = body.chat_template_kwargs
            text = render_chat(tokenizer, body.messages, add_generation_prompt=add, kwargs=kwargs)
            # The template writes the special tokens that the model wants.
            return encode(tokenizer, text, add_special_tokens=bool(body.add_special_tokens))

        self._engine.check_room(1)  # before any work is done for it
        prompts = [await asyncio.to_thread(prompt)]
        name, asked = "max_completion_tokens", body.max_completion_tokens
        if asked is None:
            name, asked = "max_tokens", body.max_tokens
        return await self._openai(http, body, prompts, asked, name, chat=True)

    async def completions(self, http: HttpRequest) -> Response:
        body = await self._read(http, CompletionRequest)
        tokenizer = self._check(body.model)
        special = body.add_special_tokens is not False
        prompts = await self._prompts(tokenizer, body.prompt, special, "prompt")
        asked = 16 if body.max_tokens is None else body.max_tokens  # OpenAI's default
        return await self._openai(http, body, prompts, asked, "max_tokens", chat=False)

    async def _openai(
        self,
        http: HttpRequest,
        body: OpenAIRequest,
        prompts: list[tuple[int, ...]],
        max_tokens: int | None,
        max_name: str,
        *,
        chat: bool,
    ) -> Response:
        include_usage = body.wants_usage
        prefix = "chatcmpl" if chat else "cmpl"
        answer_id = body.request_id or f"{prefix}-{uuid.uuid4().hex}"
        params = self._params(body, max_tokens, body.seed, max_name)
        submission, answers = await self._submit(
            answer_id, prompts, body, params, bool(body.include_stop_str_in_output)
        )
        shape = OpenAIShape(answer_id, self._name, chat=chat)
        changes = deltas(submission, answers, self._metrics)
        if body.stream:
            events = shape.events(changes, answers, include_usage=include_usage)
            return EventStream(events, submission.close)
        return await self._whole(http, submission, changes, lambda: shape.whole(answers))

    async def generate(self, http: HttpRequest) -> Response:
        body = await self._read(http, NativeRequest)
        tokenizer = self._check(None)
        if (body.text is None) == (body.input_ids is None):
            raise ApiError(400, "give text or input_ids, one of them", param="text")
        source = body.input_ids if body.text is None else body.text
        param = "input_ids" if body.text is None else "text"
        prompts = await self._prompts(tokenizer, source, True, param)
        sampling = body.sampling_params or NativeSampling()
        asked = 128 if sampling.max_new_tokens is None else sampling.max_new_tokens  # SGLang's
        params = self._params(sampling, asked, sampling.sampling_seed, "max_new_tokens")
        answer_id = body.rid or uuid.uuid4().hex
        submission, answers = await self._submit(
            answer_id, prompts, sampling, params, bool(sampling.no_stop_trim)
        )
        changes = deltas(submission, answers, self._metrics)
        many = isinstance(source, list) and isinstance(source[0], str | list)
        if body.stream:
            return EventStream(native_events(changes, answers, many=many), submission.close)
        objects = lambda: [native(answer) for answer in answers]  # noqa: E731
        answer = objects if many else lambda: objects()[0]
        return await self._whole(http, submission, changes, answer)

    async def _whole(
        self,
        http: HttpRequest,
        submission: Submission,
        changes: AsyncIterator[Any],
        answer: Callable[[], Any],
    ) -> Response:
        async def finish() -> Response:
            async for _ in changes:
                pass
            return JSONResponse(answer())

        try:
            response = await unless_disconnected(http.receive, finish())
        finally:
            submission.close()
        return response or Response(status_code=GONE)

    async def _submit(
        self,
        answer_id: str,
        prompts: list[tuple[int, ...]],
        sampling: Sampling,
        params: SamplingParams,
        include_stop: bool,
    ) -> tuple[Submission, list[Answer]]:
        """Admit every prompt of one answer, or none."""
        served = self._engine.served
        assert served.tokenizer is not None
        if any(_answer_of(i) == answer_id for i in self._engine.live_ids()):
            raise ApiError(400, f"request id {answer_id!r} is in use", param="request_id")
        many = len(prompts) > 1
        requests = [
            Request(f"{answer_id}/{i}" if many else answer_id, ids, params)
            for i, ids in enumerate(prompts)
        ]
        answers = [
            Answer(
                request.id,
                len(request.prompt_ids),
                TextStream(
                    served.tokenizer,
                    stop=sampling.stops,
                    skip_special_tokens=sampling.skip_special_tokens is not False,
                    include_stop=include_stop,
                ),
            )
            for request in requests
        ]
        return await self._engine.submit(requests), answers

    def _params(
        self, sampling: Sampling, max_tokens: int | None, seed: int | None, name: str
    ) -> SamplingParams:
        """A max_tokens beyond the context's end is no error: the engine stops there, with finish
        reason "length"."""
        served = self._engine.served
        if max_tokens is None:
            max_tokens = served.engine.max_model_len
        return sampling.params(
            max_tokens=max_tokens, seed=seed, defaults=served.defaults, name=name
        )

    async def _prompts(
        self,
        tokenizer: PreTrainedTokenizerFast,
        source: str | Sequence[Any] | None,
        add_special_tokens: bool,
        param: str,
    ) -> list[tuple[int, ...]]:
        """One prompt or several, as text or as ids. Raises ApiError on an empty one."""

        def one(prompt: str | Sequence[int]) -> tuple[int, ...]:
            if isinstance(prompt, str):
                # A prompt that is only the tokenizer's own BOS would continue nothing.
                special = add_special_tokens and prompt != ""
                return encode(tokenizer, prompt, add_special_tokens=special)
            return tuple(prompt)

        several = isinstance(source, list) and source and not isinstance(source[0], int)
        items = list(source) if several and source else [source]
        self._engine.check_room(len(items))  # before any work is done for them
        prompts = await asyncio.to_thread(lambda: [one(item or "") for item in items])
        if not all(prompts):
            raise ApiError(400, "a prompt is empty; give at least one token", param=param)
        return prompts

    # Text

    async def tokenize(self, http: HttpRequest) -> Response:
        body = await self._read(http, TokenizeRequest)
        tokenizer = self._check(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give prompt or messages, one of them", param="prompt")

        def ids() -> tuple[int, ...]:
            text, special = body.prompt, body.add_special_tokens
            if text is None:
                add = body.add_generation_prompt is not False
                kwargs = body.chat_template_kwargs
                text = render_chat(
                    tokenizer, body.messages or (), add_generation_prompt=add, kwargs=kwargs
                )
                return encode(tokenizer, text, add_special_tokens=bool(special))
            return encode(tokenizer, text, add_special_tokens=special is not False)

        tokens = await asyncio.to_thread(ids)
        limit = self._engine.served.engine.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def detokenize(self, http: HttpRequest) -> Response:
        body = await self._read(http, DetokenizeRequest)
        tokenizer = self._check(body.model)
        wrong = next((t for t in body.tokens if not 0 <= t < 2**31), None)
        if wrong is not None:
            raise ApiError(400, f"{wrong} is no token id", param="tokens")
        decode = tokenizer.backend_tokenizer.decode
        text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    # Operations

    async def abort(self, http: HttpRequest) -> Response:
        body = await self._read(http, AbortRequest)
        wanted = body.request_id or body.rid
        if not wanted and not body.abort_all:
            raise ApiError(400, "give request_id, or abort_all: true", param="request_id")
        live = self._engine.live_ids()
        ids = [i for i in live if body.abort_all or _answer_of(i) == wanted]
        return JSONResponse({"aborted": [i for i in ids if self._engine.abort(i)]})

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, http: HttpRequest) -> Response:
        self._check(http.path_params["model"])
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "dflash_jax",
            "root": self._engine.served.name,
            "max_model_len": self._engine.served.engine.max_model_len,
        }

    async def health(self, _: HttpRequest) -> Response:
        """Alive, whether or not requests are admitted; 503 once the engine has failed."""
        failed = self._engine.status == "failed"
        body = {"status": self._engine.status, "failure": self._engine.failure}
        return JSONResponse(body, 503 if failed else 200)

    async def ready(self, _: HttpRequest) -> Response:
        ready = self._engine.status == "ready"
        return JSONResponse({"status": self._engine.status}, 200 if ready else 503)

    async def metrics_page(self, _: HttpRequest) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": __version__, "jax": jax.__version__})

    async def server_info(self, _: HttpRequest) -> Response:
        served = self._engine.served
        engine = dataclasses.asdict(served.engine.config)
        return JSONResponse({"model": self._name, "engine": engine, "args": self._config.info})

    async def flush_cache(self, _: HttpRequest) -> Response:
        """Nothing outlives a request here, so the cache is as if flushed."""
        return PlainTextResponse("Nothing is cached between requests.\n")

    # What every endpoint needs

    @property
    def _name(self) -> str:
        return self._config.model_name or self._engine.served.name

    def _check(self, model: str | None) -> PreTrainedTokenizerFast:
        """The tokenizer. Raises ApiError 503 while not serving and 404 on another model's name."""
        served = self._engine.served
        if model is not None and model != self._name:
            raise ApiError(
                404, f"model {model[:200]!r} is not served here; accepted: {self._name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip
        if served.tokenizer is None:
            raise ApiError(503, "the model has no tokenizer", code="no_tokenizer")
        return served.tokenizer

    async def _read(self, http: HttpRequest, kind: type[AnyBody]) -> AnyBody:
        """The body, parsed. Raises ApiError 413 as soon as it is too large."""
        _ = self._engine.served  # 503 before anything is read
        limit = self._config.max_request_bytes
        error = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        declared = http.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise error
        body = bytearray()
        async for chunk in http.stream():
            body += chunk
            if len(body) > limit:
                raise error
        return parse(kind, bytes(body))
