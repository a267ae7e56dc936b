"""Writing a block's own K and V into their pages."""

from jax.experimental.pallas.tpu import InterpretParams
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.kv_write import reference, tpu
from pallas_kernels.paging import check_rows
from pallas_kernels.platform import select

IMPLEMENTATIONS = {"reference": reference.kv_write, "tpu": tpu.kv_write}
AUTO = {"cpu": "reference", "gpu": "reference", "tpu": "tpu"}
KERNELS = {"tpu": tpu.Tiles}


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
    check_rows("kv_write", batch, page_table, start=start, count=count)
    write = select(
        "kv_write", implementation, IMPLEMENTATIONS, AUTO, KERNELS, tiles=tiles, interpret=interpret
    )
    return write(k_pages, v_pages, k, v, page_table, start, count)
