"""Attention of a T-token block over its paged context and its own in-block K/V."""

import jax.numpy as jnp
from jax.experimental.pallas.tpu import InterpretParams
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.block_attention import gpu, portable, reference, tpu
from pallas_kernels.narrow import NARROW_DTYPES
from pallas_kernels.paging import check_not_empty, check_rows
from pallas_kernels.platform import select

IMPLEMENTATIONS = {
    "reference": reference.block_attention,
    "portable": portable.block_attention,
    "tpu": tpu.block_attention,
    "gpu": gpu.block_attention,
}
AUTO = {"cpu": "portable", "gpu": "gpu", "tpu": "tpu"}
KERNELS = {"tpu": tpu.Tiles, "gpu": gpu.Tiles}
QUERY_DTYPES = (jnp.bfloat16, jnp.float32)


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    k_pages: Num[Array, "P K page W"],
    v_pages: Num[Array, "P K page W"],
    page_table: Int[Array, "B pages"],
    context_lengths: Int[Array, "B"],
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    k_scale: Float[Array, "K"] | None = None,
    v_scale: Float[Array, "K"] | None = None,
    implementation: str = "auto",
    tiles: tpu.Tiles | gpu.Tiles | None = None,
    interpret: bool | InterpretParams = False,
) -> Float[Array, "B T N H"]:
    """Softmax attention; token t of row b stands at position ``context_lengths[b] + t``.

    Serves prefill chunks, verification (causal) and drafts (bidirectional): a query sees every
    context position below its row's length and, in the block, every key (or with ``causal`` the
    keys up to itself). ``window`` W hides keys at positions <= query - W, in both. The block's
    own K/V are operands of their own and need not be in the pages, whose rows may be wider than H
    (``paging.row_width``) with zeros behind it.

    A context length is at most the table's pages times their size: kernels read past a longer
    row's table. Pages that hold no visible position are never looked at (they may hold NaN).
    ``scale`` defaults to H**-0.5; ``soft_cap`` c turns a score s into c tanh(s / c). Softmax in
    float32; the result has q's dtype. Pages may be int8 or float8 under a bfloat16 or float32 q: a
    page's value times its head's ``k_scale`` or ``v_scale`` (default 1) is what was stored.

    ``implementation``: "auto" takes the kernel on a TPU and on a GPU and "portable" on a CPU;
    "reference" and "portable" run anywhere, "tpu" and "gpu" are kernels for these, and with
    ``interpret`` run (slowly) on a CPU. ``tiles``: the sizes of the kernel named; the default
    depends on the chip. The GPU kernel multiplies float32 in TF32 parts (``product.tf32_x3``).

    Raises ValueError where shapes or dtypes disagree or the implementation does not take them.
    """
    _check(q, k, v, k_pages, v_pages, page_table, context_lengths, window, soft_cap)
    for name, factors in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factors is not None and factors.shape != k.shape[2:3]:
            raise ValueError(
                f"block_attention: {name} {factors.shape} should be one of {k.shape[2]} kv heads"
            )
    attend = select(
        "block_attention", implementation, IMPLEMENTATIONS, AUTO, KERNELS,
        tiles=tiles, interpret=interpret,
    )  # fmt: skip
    if k_pages.dtype == q.dtype and not k_scale is v_scale is None:
        raise ValueError("block_attention: k_scale and v_scale are for int8 and float8 pages")
    ones = jnp.ones(k.shape[2], jnp.float32)
    return attend(
        q,
        k,
        v,
        k_pages,
        v_pages,
        page_table,
        context_lengths,
        ones if k_scale is None else k_scale.astype(jnp.float32),
        ones if v_scale is None else v_scale.astype(jnp.float32),
        causal=causal,
        window=window,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        soft_cap=soft_cap,
    )


def _check(q, k, v, k_pages, v_pages, page_table, context_lengths, window, soft_cap) -> None:
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    check_not_empty("block_attention", q=q, k=k, page_table=page_table)
    if k.shape != (batch, tokens, kv_heads, head_dim) or v.shape != k.shape:
        raise ValueError(f"block_attention: q {q.shape} does not fit k {k.shape}, v {v.shape}")
    if heads % kv_heads:
        raise ValueError(f"block_attention: {heads} query heads are no multiple of {kv_heads}")
    fits = k_pages.shape[1] == kv_heads and k_pages.shape[3] >= head_dim
    if k_pages.shape != v_pages.shape or not fits:
        raise ValueError(
            f"block_attention: pages {k_pages.shape}, {v_pages.shape} do not fit k {k.shape}"
        )
    check_rows("block_attention", batch, page_table, context_lengths=context_lengths)
    if q.dtype not in QUERY_DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"block_attention: q {q.dtype}, k {k.dtype}, v {v.dtype} must be one of bfloat16 and "
            "float32"
        )
    if k_pages.dtype != v_pages.dtype or k_pages.dtype not in (q.dtype, *NARROW_DTYPES):
        accepted = ", ".join(str(jnp.dtype(d)) for d in (q.dtype, *NARROW_DTYPES))
        raise ValueError(
            f"block_attention: pages {k_pages.dtype}, {v_pages.dtype} under a {q.dtype} query must "
            f"both be one of {accepted}"
        )
    if window is not None and window < 1:
        raise ValueError(f"block_attention: window must be at least 1, got {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"block_attention: soft_cap must be above 0, got {soft_cap}")
