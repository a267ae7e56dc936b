"""Which implementation of an op runs. An explicit choice never falls back."""

from collections.abc import Callable, Mapping
from typing import Any


def select(
    op: str, implementation: str, implementations: Mapping[str, Callable[..., Any]], auto: str
) -> Callable[..., Any]:
    """The named implementation of ``op``; ``auto`` is the op's own choice.

    Raises ValueError naming the op, the request and what is accepted.
    """
    name = auto if implementation == "auto" else implementation
    if name not in implementations:
        accepted = ", ".join(["auto", *implementations])
        raise ValueError(f"{op}: no implementation {implementation!r}; accepted: {accepted}")
    return implementations[name]
