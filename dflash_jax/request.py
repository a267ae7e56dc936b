"""What a caller asks for and what it gets back, token by token."""

import dataclasses
import math
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How a request draws and where it ends.

    temperature 0 is greedy. top_k 0 (or -1), top_p 1 and min_p 0 switch a filter off. An unseeded
    request gets a seed at admission. ``stop_token_ids`` end the output like EOS does; the stop
    token is the last of the output's ids. Raises ValueError naming the field and what is accepted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        def check(name: str, ok: bool, accepted: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {accepted}, got {getattr(self, name)!r}")

        finite = math.isfinite(self.temperature) and 0 <= self.temperature <= 100
        check("temperature", finite, "a number from 0 to 100")
        check("top_k", -1 <= self.top_k < 2**31, "-1 (off) or an integer from 0 (off)")
        check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        check("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        in_range = self.seed is None or -(2**63) <= self.seed < 2**64
        check("seed", in_range, "a 64-bit integer or null")


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to continue. ``id`` is the caller's and unique among live requests."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()


@dataclasses.dataclass(frozen=True)
class Update:
    """New tokens of one request, already cut at EOS, stop token or length.

    ``committed``: the raw count of the cycle that made them (accepted drafts + 1), None for the
    token that prefill drew. ``drafted``: draft tokens proposed in that cycle.
    """

    request_id: str
    tokens: tuple[int, ...]
    committed: int | None = None
    drafted: int = 0
    finish_reason: FinishReason | None = None


def cut(
    tokens: list[int], room: int, stop_ids: frozenset[int]
) -> tuple[list[int], FinishReason | None]:
    """Cut newly committed tokens at the first place where the output ends.

    ``room``: tokens that may still be emitted. The stop check comes before the length check: a stop
    token in the last place is a stop.
    """
    for i, token in enumerate(tokens[:room]):
        if token in stop_ids:
            return tokens[: i + 1], "stop"
    if len(tokens) >= room:
        return tokens[:room], "length"
    return tokens, None
