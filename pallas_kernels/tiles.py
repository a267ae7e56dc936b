"""What every kernel's tile sizes must be: checked where they are made, not where they fail."""

from collections.abc import Iterable
from typing import Any


def check_sizes(
    tiles: Any, *, powers: Iterable[str] = (), multiples_of_16: Iterable[str] = ()
) -> None:
    """Raises ValueError for a field of a dataclass ``tiles`` that is not positive, or is no power
    of two or multiple of 16 where that is asked for."""
    for name, value in vars(tiles).items():
        if value < 1:
            raise ValueError(f"tiles: {name} must be at least 1, got {value}")
    for name in powers:
        if (value := getattr(tiles, name)) & (value - 1):
            raise ValueError(f"tiles: {name} must be a power of two, got {value}")
    for name in multiples_of_16:
        if (value := getattr(tiles, name)) % 16:
            raise ValueError(f"tiles: {name} must be a multiple of 16, got {value}")
