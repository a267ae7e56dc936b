"""The library's front door: ``load`` a pair, then ``generate`` or ``stream``.

llm = dflash_jax.load()                       # the embedded pair
result = llm.generate("The capital of France is", max_new_tokens=32)
print(result.text, result.statistics.tau)
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import re
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, cast, get_args, overload

import jax
import jax.numpy as jnp

from dflash_jax import embedded
from dflash_jax.checkpoint import (
    draft_tensor_name,
    load_params,
    open_source,
    target_tensor_name,
)
from dflash_jax.config_keys import ConfigError
from dflash_jax.decoder import Pair, PairParams
from dflash_jax.engine import Engine, EngineConfig
from dflash_jax.hf_config import read_draft_config, read_target_config
from dflash_jax.request import FinishReason, Request, SamplingParams, Update
from dflash_jax.resolve import ResolveError, resolve
from dflash_jax.sharding import Sharding, make_mesh
from dflash_jax.statistics import DecodeStatistics
from dflash_jax.text import TextStream
from dflash_jax.tokenizer import PreTrainedTokenizerFast, encode_chat, load_tokenizer

logger = logging.getLogger(__name__)

EMBEDDED_NAME = "SmolLM2-135M-Instruct"

HONOURED_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "do_sample")
"""What the server takes from a checkpoint's generation_config.json."""

_BOOKKEEPING = re.compile(
    r"_.*|(bos|eos|pad|decoder_start)_token_id|transformers_version|use_cache|cache_.*|output_.*"
    r"|return_.*|max_length|max_new_tokens|.*assistant.*"
)
_OFF_AT_ONE = frozenset(
    {
        "repetition_penalty", "encoder_repetition_penalty", "length_penalty", "typical_p",
        "num_beams", "num_beam_groups", "num_return_sequences",
    }
)  # fmt: skip
"""Settings of generation_config.json that change nothing at 1; all others do not at 0 or empty."""

DType = Literal["float32", "bfloat16"]
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """One output: new tokens only. ``text`` is None for a model without a tokenizer."""

    output_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    statistics: DecodeStatistics

    @property
    def tau(self) -> float:
        return self.statistics.tau


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one step added to a stream. ``committed``: the cycle's raw count, None for the first
    token, which prefill draws."""

    output_ids: list[int]
    text: str
    committed: int | None
    finish_reason: FinishReason | None


class LLM:
    """A loaded pair and its engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerFast | None,
        name: str,
        defaults: dict[str, Any],
    ):
        """``defaults``: the checkpoint's own sampling values (generation_config.json), which the
        server applies and the library only reports."""
        self.engine, self.tokenizer, self.name, self.defaults = engine, tokenizer, name, defaults
        self._ids = itertools.count()
        self._arrived: dict[str, deque[tuple[Update, float]]] = {}  # by live request

    @property
    def pair(self) -> Pair:
        return self.engine.pair

    def with_engine(self, config: EngineConfig) -> "LLM":
        """The same weights under another engine; without speculation the draft is left out."""
        pair, params = self.pair, self.engine.params
        if not config.speculation:
            pair = dataclasses.replace(pair, draft=None, draft_config=None)
            params = PairParams(params.target, {})
        return LLM(Engine(pair, params, config), self.tokenizer, self.name, self.defaults)

    def encode(
        self, prompt: Prompt, template_variables: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a prompt: text as it is, messages through the chat template.

        ``template_variables``: what the template reads beside the messages, such as
        {"enable_thinking": False}. Raises ValueError, with the template's own complaint.
        """
        if not isinstance(prompt, str) and all(isinstance(i, Integral) for i in prompt):
            return tuple(int(i) for i in cast(Sequence[int], prompt))
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer; give the prompt as token ids")
        if isinstance(prompt, str):
            if any("\ud800" <= c <= "\udfff" for c in prompt):
                raise ValueError("the prompt is not valid Unicode: it holds half a surrogate pair")
            return tuple(self.tokenizer(prompt)["input_ids"])
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{self.name} has no chat template; give the prompt as text or ids")
        messages = cast(Sequence[dict[str, Any]], prompt)
        return encode_chat(self.tokenizer, messages, template_variables or {})

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]  (a str is a sequence of str)
        self,
        prompts: Prompt,
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        **settings: Any,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        **settings: Any,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        **settings: Any,
    ) -> Generation | list[Generation]:
        """Continue one prompt (-> Generation) or a list of them (-> list, in order).

        ``sampling``, or its fields as keywords (max_new_tokens, temperature, top_p, seed, ...).
        ``stop``: strings that end the output. A list of ints is ONE prompt of token ids, a list
        of dicts one chat.
        """
        many = isinstance(prompts, Sequence) and bool(prompts)
        many = many and not isinstance(prompts, str) and not isinstance(prompts[0], Integral | dict)
        batch = list(prompts) if many else [prompts]
        outputs = [Collector() for _ in batch]
        for index, (piece, seconds) in self._run(batch, _sampling(sampling, settings), stop):  # pyright: ignore[reportArgumentType]
            outputs[index].add(piece, seconds)
        has_text = self.tokenizer is not None
        done = [output.generation(has_text=has_text) for output in outputs]
        return done if many else done[0]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        **settings: Any,
    ) -> Generator[Piece]:
        """Continue one prompt, a piece a step; the join of the pieces is generate's output.
        A stream that is closed early frees what it holds."""
        run = self._run([prompt], _sampling(sampling, settings), stop)

        def pieces() -> Generator[Piece]:
            with contextlib.closing(run):
                for _, (piece, _) in run:
                    yield piece
                    if piece.finish_reason is not None:
                        return

        return pieces()

    def _run(
        self, prompts: list[Prompt], sampling: SamplingParams, stop: str | Sequence[str]
    ) -> Generator[tuple[int, tuple[Piece, float]]]:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if stops and self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer; stop strings need one")
        encoded = [self.encode(prompt) for prompt in prompts]
        # Speculation runs one token more than asked for, and cuts it: then the cycles alone commit
        # max_new_tokens, and tokens_per_cycle is what the reference implementation counts.
        spare = 1 if self.engine.block_size > 1 else 0
        longer = dataclasses.replace(sampling, max_new_tokens=sampling.max_new_tokens + spare)
        live: dict[str, _Live] = {}
        try:
            for index, ids in enumerate(encoded):
                request_id = f"generate-{next(self._ids)}"
                text = TextStream(self.tokenizer, stop=stops) if self.tokenizer else None
                self.engine.add(Request(request_id, ids, longer))
                live[request_id] = _Live(index, text, sampling.max_new_tokens)
                self._arrived[request_id] = deque()
            while live:
                request_id = next((i for i in live if self._arrived[i]), None)
                if request_id is None:
                    self._step()
                    continue
                update, seconds = self._arrived[request_id].popleft()
                request = live[request_id]
                piece, ended = request.take(update.tokens, update.finish_reason, update.committed)
                if ended:
                    del live[request_id], self._arrived[request_id]
                    self.engine.abort(request_id)  # a stop string ends it early
                yield request.index, (piece, seconds)
        finally:
            for request_id in live:
                del self._arrived[request_id]
                self.engine.abort(request_id)

    def _step(self) -> None:
        """One step, and its updates to whom they belong: several streams may be open."""
        started = time.perf_counter()
        updates = self.engine.step()
        seconds = time.perf_counter() - started
        for update in updates:
            if update.request_id in self._arrived:
                self._arrived[update.request_id].append((update, seconds))


class _Live:
    """One running request: cuts its output at the limit and turns it into text."""

    def __init__(self, index: int, text: TextStream | None, room: int):
        self.index, self._text, self._room = index, text, room
        self._ended = False

    def take(
        self, tokens: Sequence[int], reason: FinishReason | None, committed: int | None
    ) -> tuple[Piece, bool]:
        if self._ended:  # the cycle after the last: counted, and nothing of it is emitted
            return Piece([], "", committed, None), reason is not None
        if len(tokens) >= self._room and (reason != "stop" or len(tokens) > self._room):
            kept, finish = list(tokens[: self._room]), "length"
        else:
            kept, finish = list(tokens), reason
        self._room -= len(kept)
        text = ""
        if self._text is not None:
            delta = self._text.feed(kept, finish)
            text, kept, finish = delta.text, list(delta.tokens), delta.finish_reason
        self._ended = finish is not None
        piece = Piece(kept, text, committed, finish)
        return piece, reason is not None or finish == "stop"


class Collector:
    """Adds up the pieces of one output."""

    def __init__(self):
        self.ids: list[int] = []
        self.text = ""
        self.statistics = DecodeStatistics()
        self.reason: FinishReason = "abort"

    def add(self, piece: Piece, seconds: float) -> None:
        """``seconds``: wall clock of the step that made the piece."""
        self.ids += piece.output_ids
        self.text += piece.text
        self.reason = piece.finish_reason or self.reason
        if piece.committed is not None:
            self.statistics.tokens_per_cycle.append(piece.committed)
            self.statistics.cycle_seconds.append(seconds)
            self.statistics.emitted += len(piece.output_ids)

    def generation(self, *, has_text: bool) -> Generation:
        return Generation(self.ids, self.text if has_text else None, self.reason, self.statistics)


def load(
    model: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    dtype: DType = "float32",
    data_parallel: int = 1,
    model_parallel: int = 1,
    engine: EngineConfig | None = None,
) -> LLM:
    """Load a target and its draft from paths or hub ids; with neither, the embedded pair (on a CPU
    with its block size for CPUs, unless ``engine`` names one).

    A target without a draft decodes plainly. Weights go straight to their shards, one tensor at a
    time. Raises ConfigError, CheckpointError, TokenizerError, ResolveError or EmbeddedModelError,
    each saying what is wrong and what is accepted.
    """
    if dtype not in get_args(DType):
        raise ValueError(f"dtype must be one of {', '.join(get_args(DType))}, got {dtype!r}")
    engine = EngineConfig() if engine is None else engine
    if model is None and draft is None and jax.default_backend() == "cpu":
        engine = dataclasses.replace(
            engine, block_size=engine.block_size or embedded.CPU_BLOCK_SIZE
        )
    target_path, draft_path = find_pair(model, draft, speculation=engine.speculation)
    target_config = read_target_config(target_path)
    draft_config = None if draft_path is None else read_draft_config(draft_path, target_config)
    defaults = _generation_defaults(target_path)
    sharding = Sharding(make_mesh(data_parallel, model_parallel))
    pair = Pair.of(target_config, draft_config, sharding, jnp.dtype(dtype))
    tokenizer = load_tokenizer(target_path)  # before the weights, so that it fails early
    started = time.perf_counter()
    names = target_tensor_name(tie_word_embeddings=target_config.tie_word_embeddings)
    target = load_params(pair.target.placed(sharding), open_source(target_path), names)
    draft_params = {}
    if pair.draft is not None and draft_path is not None:
        draft_params = load_params(
            pair.draft.placed(sharding), open_source(draft_path), draft_tensor_name
        )
    logger.info("loaded %s in %.1f s", target_path, time.perf_counter() - started)
    name = EMBEDDED_NAME if model is None else str(model).rstrip("/")
    return LLM(
        Engine(pair, PairParams(target, draft_params), engine),
        tokenizer,
        name,
        defaults,
    )


def find_pair(
    model: str | Path | None, draft: str | Path | None, *, speculation: bool = True
) -> tuple[Path, Path | None]:
    """Where a target and its draft are, downloaded where need be; with neither, the embedded pair.

    No draft for a target named without one, nor without ``speculation``. Raises ResolveError or
    EmbeddedModelError.
    """
    target_path = embedded.fetch_target() if model is None else resolve(model)
    if not speculation or (draft is None and model is not None):
        return target_path, None
    draft_path = embedded.draft_path() if draft is None else resolve(draft)
    if draft_path.is_file():
        raise ResolveError(f"{draft}: a draft is an HF folder with config.json, not a file")
    return target_path, draft_path


def _generation_defaults(path: Path) -> dict[str, Any]:
    """The sampling values of generation_config.json, with a warning of each that is not honoured.

    Raises ConfigError naming an honoured one that is wrong and what is accepted.
    """
    file = path / "generation_config.json"
    if not path.is_dir() or not file.exists():
        return {}
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    defaults = {
        name: value
        for name, value in values.items()
        if value is not None and not _BOOKKEEPING.fullmatch(name)
    }
    for name, value in defaults.items():
        off = value in (0, "", [], {}) or (name in _OFF_AT_ONE and value == 1)
        if name not in HONOURED_DEFAULTS and not off:
            logger.warning("%s of the model: %s = %r is not honoured", file.name, name, value)
    kinds = {"do_sample": (bool,), "top_k": (int,)}
    honoured = {name: defaults[name] for name in HONOURED_DEFAULTS if name in defaults}
    for name, value in honoured.items():
        accepted = kinds.get(name, (int, float))
        if type(value) not in accepted:
            kind = " or ".join(k.__name__ for k in accepted)
            raise ConfigError(f"{file}: {name} must be of type {kind}, got {value!r}")
    honoured.pop("do_sample", None)
    try:
        SamplingParams(**honoured)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error
    return defaults


def _sampling(sampling: SamplingParams | None, settings: dict[str, Any]) -> SamplingParams:
    """Raises TypeError on a setting that SamplingParams does not have."""
    return dataclasses.replace(sampling or SamplingParams(), **settings)
