"""What speculation achieved: acceptance length, committed tokens a cycle, and loops.

tau (acceptance length): emitted tokens per cycle, the last cycle cut where the output ends; the
token that prefill drew belongs to no cycle. Source: docs/dflash.md, sections 1 and 6.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

LOOP_GRAM, LOOP_REPEATS = 8, 4


@dataclasses.dataclass
class DecodeStatistics:
    """Of one output. ``tokens_per_cycle`` is raw: accepted drafts + 1 of every cycle.
    ``emitted``: output tokens that came out of cycles. ``cycle_seconds``: wall clock of each."""

    tokens_per_cycle: list[int] = dataclasses.field(default_factory=list)
    emitted: int = 0
    cycle_seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def tau(self) -> float:
        """Emitted tokens per cycle that emitted any; 0 before the first."""
        tokens, cycles = cut_cycles(self.tokens_per_cycle, self.emitted)
        return tokens / cycles if tokens else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """Cycles by committed tokens."""
        return dict(sorted(Counter(self.tokens_per_cycle).items()))


def loop_start(tokens: Sequence[int]) -> int | None:
    """Where an output begins to loop: the start of the second occurrence of the first 8-gram that
    occurs more than 4 times; None when none does."""
    places: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(tokens) - LOOP_GRAM + 1):
        places.setdefault(tuple(tokens[i : i + LOOP_GRAM]), []).append(i)
    looping = [where[1] for where in places.values() if len(where) > LOOP_REPEATS]
    return min(looping, default=None)


def cut_cycles(tokens_per_cycle: Sequence[int], emitted: int) -> tuple[int, int]:
    """(tokens, cycles) of the cycles' first ``emitted`` tokens, the last cycle cut there."""
    total = 0
    for cycles, committed in enumerate(tokens_per_cycle, start=1):
        total += committed
        if total >= emitted:
            return emitted, cycles
    return total, len(tokens_per_cycle)
