"""Where a token's K and V live: position p of a row is page ``table[p // page_size]``, row
``p % page_size`` of each head's part of it. Page 0 is the null page: unused table entries name it,
writes to it are harmless and no live position reads it.

Pools are head-major, [P, K, page, H]: a head's page is one contiguous matrix, which a kernel copies
in one piece and multiplies as it lies, and a shard with a single head pads nothing. On a TPU their
rows are whole vectors of 128 lanes, the rest zeros: see ``row_width``.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, Num

LANES = 128


def sublanes(dtype: jnp.dtype) -> int:
    """Rows of a TPU's memory tile: what a page must be a multiple of to be copied by itself."""
    return 32 // jnp.dtype(dtype).itemsize


def row_width(head_dim: int, platform: str) -> int:
    """How wide a pool's rows are for heads of ``head_dim`` H.

    A TPU's memory holds rows in units of 128 lanes whatever H says, and asked for narrower ones XLA
    turns the whole pool around, page dimension last: every kernel that wants its rows would then be
    handed a copy of the pool.
    """
    return -(-head_dim // LANES) * LANES if platform == "tpu" else head_dim


def check_rows(
    op: str, batch: int, page_table: Int[Array, "B pages"], **vectors: Int[Array, "B"]
) -> None:
    """Raises ValueError for a page table, or for what else a row has one of, of another batch or
    not of int32."""
    integers = {"page_table": page_table, **vectors}
    if page_table.shape[:1] != (batch,) or any(x.shape != (batch,) for x in vectors.values()):
        shapes = [f"{name} {x.shape}" for name, x in integers.items()]
        raise ValueError(f"{op}: {', '.join(shapes[:-1])} and {shapes[-1]} must have {batch} rows")
    check_int32(op, **integers)


def check_not_empty(op: str, **arrays: Array) -> None:
    """Raises ValueError for what has no element: kernels have no program for nothing."""
    for name, x in arrays.items():
        if x.size == 0:
            raise ValueError(f"{op}: {name} {x.shape} is empty")


def check_int32(op: str, **integers: Int[Array, "..."]) -> None:
    """Raises ValueError for what is of another dtype once JAX has it: kernels count in int32."""
    for name, x in integers.items():
        if (dtype := jnp.result_type(x)) != jnp.int32:
            raise ValueError(f"{op}: {name} {dtype} must be int32")


def check_triton_offsets(op: str, pool: Num[Array, "P K page W"]) -> None:
    """Raise ValueError for a pool whose elements Pallas's Triton lowering cannot count: it goes to
    64-bit offsets past 2**32 bytes, and offsets are signed elements."""
    if pool.size > 2**31 and pool.size * pool.dtype.itemsize <= 2**32:
        raise ValueError(
            f"{op}: implementation 'gpu' takes {pool.dtype} pools of at most 2**31 elements, or of "
            f"more than 2**32; pages {pool.shape} are {pool.size}"
        )


def write_rows(
    pool: Num[Array, "P K page W"],
    rows: Num[Array, "B T K H"],
    page_table: Int[Array, "B pages"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
) -> Num[Array, "P K page W"]:
    """Write the first ``count`` rows of each sequence at positions ``start..start+count-1``.

    Rows past ``count`` or past the end of the page table are dropped; rows narrower than the pool's
    are filled up with zeros. Under jit with a donated pool the write is in place.
    """
    rows = jnp.pad(rows, [(0, 0)] * 3 + [(0, pool.shape[3] - rows.shape[3])])
    page_size = pool.shape[2]
    offsets = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :]
    position = start[:, None] + offsets
    live = (offsets < count[:, None]) & (position < page_table.shape[1] * page_size)
    entry = jnp.where(live, position // page_size, 0)
    page = jnp.take_along_axis(page_table, entry, axis=1)
    page = jnp.where(live, page, pool.shape[0])  # out of range, so `drop` skips the row
    return pool.at[page, :, position % page_size].set(rows.astype(pool.dtype), mode="drop")
