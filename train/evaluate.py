"""Real decoding on held-out prompts: tau, with looping answers counted up to their loop."""

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dflash_jax.generate import LLM
from dflash_jax.request import Request, SamplingParams
from dflash_jax.statistics import cut_cycles, loop_start


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """``tau``: emitted tokens per cycle, looping answers counted up to the start of their loop
    (docs/dflash.md, section 6); ``raw_tau`` beside it counts all. Means over cycles, not over
    prompts. ``acceptance[k]``: share of cycles that accepted more than k drafts."""

    prompts: int
    tau: float
    raw_tau: float
    looping: float
    acceptance: list[float]
    seconds: float
    tokens: int

    def json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def evaluate(llm: LLM, prompts: Sequence[str], sampling: SamplingParams) -> Evaluation:
    """Decode every prompt as a single user turn. Each gets its own seed where T > 0.

    Raises ValueError on a prompt that does not fit.
    """
    engine = llm.engine
    started = time.perf_counter()
    outputs: dict[str, list[int]] = {}
    cycles: dict[str, list[int]] = {}
    try:
        for i, text in enumerate(prompts):
            ids = llm.encode([{"role": "user", "content": text}])
            request_id = f"evaluate-{i}"
            engine.add(Request(request_id, ids, dataclasses.replace(sampling, seed=i)))
            outputs[request_id], cycles[request_id] = [], []
        for update in engine.run():
            outputs[update.request_id] += update.tokens
            if update.committed is not None:
                cycles[update.request_id].append(update.committed)
    finally:
        for request_id in outputs:
            engine.abort(request_id)
    seconds = time.perf_counter() - started

    emitted = raw_emitted = count = raw_count = looping = 0
    accepted: Counter[int] = Counter()
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
        accepted.update(cycles[request_id][:used])
    block = max(accepted, default=1)
    above = [sum(n for c, n in accepted.items() if c > k + 1) for k in range(block - 1)]
    return Evaluation(
        prompts=len(prompts),
        tau=emitted / max(count, 1),
        raw_tau=raw_emitted / max(raw_count, 1),
        looping=looping / max(len(prompts), 1),
        acceptance=[n / max(count, 1) for n in above],
        seconds=seconds,
        tokens=sum(map(len, outputs.values())),
    )
