"""Writing a block's own K and V into their pages."""

from functools import partial

from jax.experimental.pallas.tpu import InterpretParams
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.kv_write import reference, tpu
from pallas_kernels.platform import select
from pallas_kernels.tiles import check_type

IMPLEMENTATIONS = {"reference": reference.kv_write, "tpu": tpu.kv_write}
AUTO = {"cpu": "reference", "gpu": "reference", "tpu": "tpu"}


def kv_write(
    k_pages: Num[Array, "P K page W"],
    v_pages: Num[Array, "P K page W"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    page_table: Int[Array, "B pages"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    *,
    implementation: str = "auto",
    tiles: tpu.Tiles | None = None,
    interpret: bool | InterpretParams = False,
) -> tuple[Num[Array, "P K page W"], Num[Array, "P K page W"]]:
    """Write the first ``count`` rows of each sequence at positions ``start..``; the new pools.

    Rows past ``count`` or past the end of the page table are dropped. Under jit with donated pools
    the write is in place. ``implementation``, ``tiles`` and ``interpret`` are as in
    ``block_attention``.

    Raises ValueError where shapes disagree or the implementation does not take them.
    """
    batch, _, kv_heads, head_dim = k.shape
    fits = k_pages.shape[1] == kv_heads and k_pages.shape[3] >= head_dim
    alike = (k_pages.shape, k_pages.dtype, k.shape) == (v_pages.shape, v_pages.dtype, v.shape)
    if not (fits and alike):
        raise ValueError(
            f"kv_write: k {k.shape} and v {v.shape} do not fit pages {k_pages.shape} of "
            f"{k_pages.dtype} and {v_pages.shape} of {v_pages.dtype}"
        )
    if page_table.shape[:1] != (batch,) or not start.shape == count.shape == (batch,):
        raise ValueError(
            f"kv_write: page_table {page_table.shape}, start {start.shape} and count "
            f"{count.shape} must have {batch} rows"
        )
    write = select("kv_write", implementation, IMPLEMENTATIONS, AUTO)
    if write is tpu.kv_write:
        check_type("kv_write", tiles, tpu.Tiles)
        write = partial(write, tiles=tiles, interpret=interpret)
    elif interpret or tiles is not None:
        raise ValueError("kv_write: tiles and interpret are for implementation tpu")
    return write(k_pages, v_pages, k, v, page_table, start, count)
