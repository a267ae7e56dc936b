"""What every kernel's tile sizes must be: checked where they are made, not where they fail; and
what fits into a GPU's shared memory."""

import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

TilesT = TypeVar("TilesT")

SHARED_MEMORY = {name: 227 for name in ("H100", "H200", "GH200", "B200", "GB200")} | {"A100": 163}
"""KiB that a program can have, by what a GPU's name contains (NVIDIA's CUDA programming guide,
compute capabilities); others have 99."""


def check_sizes(
    tiles: Any,
    *,
    powers: Collection[str] = (),
    multiples_of_16: Collection[str] = (),
    may_be_0: Collection[str] = (),
) -> None:
    """Raises ValueError for a field of a dataclass ``tiles`` that is not positive, or is no power
    of two or multiple of 16 where that is asked for."""
    for name, value in vars(tiles).items():
        least = int(name not in may_be_0)
        if value < least:
            raise ValueError(f"tiles: {name} must be at least {least}, got {value}")
    for name in powers:
        if (value := getattr(tiles, name)) & (value - 1):
            raise ValueError(f"tiles: {name} must be a power of two, got {value}")
    for name in multiples_of_16:
        if (value := getattr(tiles, name)) % 16:
            raise ValueError(f"tiles: {name} must be a multiple of 16, got {value}")


def fit_keys(tiles: TilesT, kind: str, head_dim: int, itemsize: int) -> TilesT:
    """Attention's ``tiles`` with as few keys a step, down to 16, as the chip's shared memory asks
    for: it holds a tile of queries, and K and V of every stage."""
    limit = next((kib for name, kib in SHARED_MEMORY.items() if name in kind), 99) * 1024
    row = (1 << (head_dim - 1).bit_length()) * itemsize
    sizes: Any = tiles
    while sizes.keys > 16 and row * (sizes.query_rows + 2 * sizes.stages * sizes.keys) > limit:
        sizes = dataclasses.replace(sizes, keys=sizes.keys // 2)
    return sizes


MAX_HEAD_DIM = 256


def check_head_dim(op: str, head_dim: int, *, otherwise: str) -> None:
    """Raises ValueError for heads that the kernels are not built for."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"{op}: head_dim {head_dim} is over the kernels' {MAX_HEAD_DIM}; "
            f"implementation {otherwise!r} takes any"
        )
