"""Attention of a T-token block over its paged context and its own in-block K/V."""

from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention import portable, reference
from pallas_kernels.platform import select

IMPLEMENTATIONS = {
    "reference": reference.block_attention,
    "portable": portable.block_attention,
}


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    k_pages: Float[Array, "P page K H"],
    v_pages: Float[Array, "P page K H"],
    page_table: Int[Array, "B pages"],
    context_lengths: Int[Array, "B"],
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
    implementation: str = "auto",
) -> Float[Array, "B T N H"]:
    """Softmax attention; token t of row b stands at position ``context_lengths[b] + t``.

    Serves prefill chunks, verification (causal) and drafts (bidirectional): a query sees every
    context position below its row's length and, in the block, every key (or with ``causal`` the
    keys up to itself). ``window`` W hides keys at positions <= query - W, in both. The block's
    own K/V are operands of their own and need not be in the pages.

    Pages that hold no visible position are never looked at (they may hold NaN). ``scale``
    defaults to H**-0.5. Softmax in float32; the result has q's dtype.

    Raises ValueError where shapes disagree or the implementation does not exist.
    """
    _check(q, k, v, k_pages, v_pages, page_table, context_lengths, window)
    attend = select("block_attention", implementation, IMPLEMENTATIONS, auto="portable")
    return attend(
        q,
        k,
        v,
        k_pages,
        v_pages,
        page_table,
        context_lengths,
        causal=causal,
        window=window,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )


def _check(q, k, v, k_pages, v_pages, page_table, context_lengths, window) -> None:
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if k.shape != (batch, tokens, kv_heads, head_dim) or v.shape != k.shape:
        raise ValueError(f"block_attention: q {q.shape} does not fit k {k.shape}, v {v.shape}")
    if heads % kv_heads:
        raise ValueError(f"block_attention: {heads} query heads are no multiple of {kv_heads}")
    if k_pages.shape != v_pages.shape or k_pages.shape[2:] != (kv_heads, head_dim):
        raise ValueError(
            f"block_attention: pages {k_pages.shape}, {v_pages.shape} do not fit k {k.shape}"
        )
    if page_table.shape[:1] != (batch,) or context_lengths.shape != (batch,):
        raise ValueError(
            f"block_attention: page_table {page_table.shape} and context_lengths "
            f"{context_lengths.shape} must have {batch} rows"
        )
    if window is not None and window < 1:
        raise ValueError(f"block_attention: window must be at least 1, got {window}")
