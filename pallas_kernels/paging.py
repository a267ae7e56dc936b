"""Where a token's K and V live: position p of a row is page ``table[p // page_size]``, row
``p % page_size`` of the pool. Page 0 is the null page: unused table entries name it, writes to it
are harmless and no live position reads it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def write_rows(
    pool: Float[Array, "P page K H"],
    rows: Float[Array, "B T K H"],
    page_table: Int[Array, "B pages"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
) -> Float[Array, "P page K H"]:
    """Write the first ``count`` rows of each sequence at positions ``start..start+count-1``.

    Rows past ``count`` or past the end of the page table are dropped. Under jit with a donated
    pool the write is in place.
    """
    page_size = pool.shape[1]
    offsets = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :]
    position = start[:, None] + offsets
    live = (offsets < count[:, None]) & (position < page_table.shape[1] * page_size)
    entry = jnp.where(live, position // page_size, 0)
    page = jnp.take_along_axis(page_table, entry, axis=1)
    page = jnp.where(live, page, pool.shape[0])  # out of range, so `drop` skips the row
    return pool.at[page, position % page_size].set(rows.astype(pool.dtype), mode="drop")
