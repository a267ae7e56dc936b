"""Real decoding on held-out questions: tau, with looping answers counted up to their loop."""

import dataclasses
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.cli.info import devices, versions
from dflash_jax.decoder import PairParams
from dflash_jax.engine import Engine, EngineConfig
from dflash_jax.generate import LLM
from dflash_jax.request import Request, SamplingParams
from dflash_jax.speculative import DraftSampling
from dflash_jax.statistics import cut_cycles, loop_start
from train.files import write_whole
from train.initial import random_draft
from train.questions import Question


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """``tau``: emitted tokens per cycle, looping answers counted up to the start of their loop
    (docs/dflash.md, section 6); ``raw_tau`` beside it counts all. Means over cycles, not over
    questions. ``looping``: share of answers that loop.

    Of the cycles before loops: ``histogram`` counts them by the tokens that they committed;
    ``acceptance[k]`` is the share that accepted the draft of in-block position k + 1, and
    ``reached_acceptance[k]`` the same among those that had accepted all drafts before it (None
    where none had). ``tokens`` are all that were emitted; ``seconds`` are wall clock."""

    questions: int
    tau: float
    raw_tau: float
    looping: float
    acceptance: list[float]
    reached_acceptance: list[float | None]
    histogram: dict[int, int]
    tokens: int
    seconds: float
    tokens_per_second: float

    def json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How answers are decoded. ``block_size`` 1 is plain decoding, without a draft."""

    block_size: int
    temperature: float
    draft_sampling: DraftSampling


def evaluate(
    llm: LLM,
    questions: Sequence[Question],
    sampling: SamplingParams,
    template_variables: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Answer every question, each with a seed of its own where T > 0.

    Compilation counts into the seconds: call ``llm.engine.warm_up()`` before. Raises ValueError
    naming a question that does not fit or that the chat template refuses.
    """
    engine = llm.engine
    started = time.perf_counter()
    outputs: dict[str, list[int]] = {}
    cycles: dict[str, list[int]] = {}
    try:
        for question in questions:
            seeded = dataclasses.replace(sampling, seed=question.seed(sampling.seed or 0))
            try:
                ids = question.encode(llm, template_variables)
                engine.add(Request(question.id, ids, seeded))
            except ValueError as error:
                raise ValueError(f"evaluation question {question.id!r}: {error}") from error
            outputs[question.id], cycles[question.id] = [], []
        for update in engine.run():
            outputs[update.request_id] += update.tokens
            if update.committed is not None:
                cycles[update.request_id].append(update.committed)
    finally:
        for request_id in outputs:
            engine.abort(request_id)
    return _summary(outputs, cycles, engine.block_size, time.perf_counter() - started)


def _summary(
    outputs: Mapping[str, list[int]],
    cycles: Mapping[str, list[int]],
    block_size: int,
    seconds: float,
) -> Evaluation:
    emitted = raw_emitted = count = raw_count = looping = 0
    histogram: Counter[int] = Counter()
    for request_id, output in outputs.items():
        from_cycles = len(output) - 1  # the first token is prefill's
        raw_emitted += from_cycles
        raw_count += len(cycles[request_id])
        loop = loop_start(output)
        looping += loop is not None
        until = from_cycles if loop is None else max(loop - 1, 0)
        tokens, used = cut_cycles(cycles[request_id], until) if until else (0, 0)
        emitted += tokens
        count += used
        histogram.update(cycles[request_id][:used])
    # above[k]: cycles that committed more than k tokens, so accepted k drafts at least
    above = [sum(n for c, n in histogram.items() if c > k) for k in range(block_size)]
    total = sum(map(len, outputs.values()))
    return Evaluation(
        questions=len(outputs),
        tau=emitted / max(count, 1),
        raw_tau=raw_emitted / max(raw_count, 1),
        looping=looping / max(len(outputs), 1),
        acceptance=[n / max(count, 1) for n in above[1:]],
        reached_acceptance=[n / m if m else None for m, n in itertools.pairwise(above)],
        histogram=dict(sorted(histogram.items())),
        tokens=total,
        seconds=seconds,
        tokens_per_second=total / seconds,
    )


def settings_of(
    block_sizes: Sequence[int],
    temperatures: Sequence[float],
    draft_samplings: Sequence[DraftSampling],
) -> Iterator[Setting]:
    """Every combination that decodes differently, one engine's beside each other: ways of drafting
    differ at T > 0 alone, and not without a draft."""
    for number, draft_sampling in enumerate(draft_samplings):
        for block_size, temperature in itertools.product(block_sizes, temperatures):
            if number == 0 or (temperature > 0 and block_size > 1):
                yield Setting(block_size, temperature, draft_sampling)


def evaluate_settings(
    llm: LLM,
    questions: Sequence[Question],
    settings: Sequence[Setting],
    engine: EngineConfig,
    *,
    max_new_tokens: int,
    seed: int = 0,
    template_variables: Mapping[str, Any] | None = None,
    label: str = "trained",
) -> Iterator[dict[str, Any]]:
    """One JSON object a setting and source: the setting, ``label``, and an Evaluation's fields.

    Every engine (``engine`` with a setting's block size and way of drafting) is warmed up first.
    """
    by_source: dict[str, list[Question]] = {}
    for question in questions:
        by_source.setdefault(question.source, []).append(question)
    engines = itertools.groupby(settings, key=lambda s: (s.block_size, s.draft_sampling))

    def measured(config: EngineConfig, group: Iterator[Setting]) -> Iterator[dict[str, Any]]:
        """A frame of its own: one engine's KV pools are freed before the next one's are made."""
        decoding = llm.with_engine(config)
        decoding.engine.warm_up()
        for setting, (source, asked) in itertools.product(group, by_source.items()):
            sampling = SamplingParams(
                temperature=setting.temperature, seed=seed, max_new_tokens=max_new_tokens
            )
            result = evaluate(decoding, asked, sampling, template_variables)
            about = {"label": label, "source": source, **dataclasses.asdict(setting)}
            yield {**about, **result.json()}

    for (block_size, draft_sampling), group in engines:
        config = dataclasses.replace(engine, block_size=block_size, draft_sampling=draft_sampling)
        yield from measured(config, group)


def untrained(llm: LLM, seed: int) -> LLM:
    """The same pair with a draft of random weights: the baseline."""
    target = llm.engine.params.target
    params = PairParams(target, random_draft(llm.pair, target, seed))
    return LLM(Engine(llm.pair, params, llm.engine.config), llm.tokenizer, llm.name, llm.defaults)


class EvaluationFile:
    """evaluation.json: {"settings": ..., "results": [...]}, whole after every result."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        """``settings``: what all results share; devices and versions are added."""
        self._path = path
        self._content: dict[str, Any] = {
            "settings": {**settings, "devices": devices(), "versions": versions()},
            "results": [],
        }

    def add(self, result: Mapping[str, Any]) -> None:
        self._content["results"].append(result)
        write_whole(self._path, json.dumps(self._content, indent=1) + "\n")


def one_line(result: Mapping[str, Any]) -> str:
    """A result for a reader who watches."""
    return (
        f"{result['label']} b {result['block_size']} T {result['temperature']} "
        f"{result['draft_sampling']} {result['source']}: tau {result['tau']:.3f} "
        f"(raw {result['raw_tau']:.3f}, {result['looping']:.0%} looping), "
        f"{result['tokens_per_second']:.0f} tok/s"
    )
