"""What a caller asks for and what it gets back, token by token."""

import dataclasses
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Literal, cast

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

        def real(value: Any, low: float, high: float) -> bool:
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            return is_number and bool(low <= cast(Any, value) <= high)  # NaN is in no range

        def whole(value: Any, low: int, high: int) -> bool:
            return isinstance(value, Integral) and real(value, low, high)

        check("temperature", real(self.temperature, 0, 100), "a number from 0 to 100")
        check("top_k", whole(self.top_k, -1, 2**31 - 1), "-1 (off) or an integer from 0 (off)")
        check("top_p", real(self.top_p, 0, 1) and self.top_p > 0, "in (0, 1]")
        check("min_p", real(self.min_p, 0, 1), "in [0, 1]")
        check("max_new_tokens", whole(self.max_new_tokens, 1, 2**31 - 2), "at least 1, an integer")
        seeded = self.seed is not None
        check(
            "seed", not seeded or whole(self.seed, -(2**63), 2**64 - 1), "a 64-bit integer or null"
        )
        stops = self.stop_token_ids
        listed = isinstance(stops, Iterable) and all(whole(i, 0, 2**31 - 1) for i in stops)
        check("stop_token_ids", listed, "a sequence of token ids")


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
