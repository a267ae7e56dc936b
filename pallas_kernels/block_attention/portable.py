"""Block attention for any backend: an online softmax over the live part of the context.

The context is read in chunks of whole pages and the loop ends at the longest live row, so the cost
follows the live context and not the page table's width. A window moves the loop's start too.
"""

import jax
import jax.numpy as jnp

CHUNK_TOKENS = 512  # long enough for full GEMMs, short enough to waste little on a short context


def block_attention(
    q, k, v, k_pages, v_pages, page_table, context_lengths, k_scale, v_scale,
    *, causal, window, scale, soft_cap,
):  # fmt: skip
    batch, tokens, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    groups = heads // kv_heads
    queries = q.reshape(batch, tokens, kv_heads, groups, head_dim)
    offset = jnp.arange(tokens)

    def scores_of(keys, visible):
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", queries, keys, preferred_element_type=jnp.float32)
        scores *= scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        return jnp.where(visible[:, None, None], scores, -jnp.inf)

    def weighted(weights, values):
        return jnp.einsum(
            "BKGTS,BSKH->BKGTH",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )

    # The block sees itself, so the running maximum is finite from the start.
    distance = offset[:, None] - offset[None, :]
    visible = jnp.ones_like(distance, bool)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance < window
    scores = scores_of(k, jnp.broadcast_to(visible[None], (batch, tokens, tokens)))
    peak = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    carry = peak, weights.sum(-1, keepdims=True), weighted(weights, v)

    pages_per_chunk = min(max(1, CHUNK_TOKENS // page_size), page_table.shape[1])
    chunk = pages_per_chunk * page_size
    num_chunks = -(-page_table.shape[1] // pages_per_chunk)
    padding = num_chunks * pages_per_chunk - page_table.shape[1]
    table = jnp.pad(page_table, ((0, 0), (0, padding)))  # the null page fills up the last chunk

    def dense(pool, scales, pages):
        rows = pool[pages][..., :head_dim].swapaxes(2, 3).reshape(batch, chunk, kv_heads, head_dim)
        if rows.dtype == q.dtype:
            return rows
        return (rows.astype(jnp.float32) * scales[None, None, :, None]).astype(q.dtype)

    def attend_chunk(index, carry):
        peak, total, out = carry
        pages = jax.lax.dynamic_slice_in_dim(table, index * pages_per_chunk, pages_per_chunk, 1)
        position = index * chunk + jnp.arange(chunk)
        exists = position[None, :] < context_lengths[:, None]
        visible = jnp.broadcast_to(exists[:, None, :], (batch, tokens, chunk))
        if window is not None:
            query_position = context_lengths[:, None] + offset[None, :]
            visible &= query_position[:, :, None] - position[None, None, :] < window
        keys, values = dense(k_pages, k_scale, pages), dense(v_pages, v_scale, pages)
        # The first query sees the most of the context; a weight of 0 times NaN would be NaN.
        values = jnp.where(visible[:, 0, :, None, None], values, 0)
        scores = scores_of(keys, visible)
        new_peak = jnp.maximum(peak, scores.max(-1, keepdims=True))
        decay = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak)
        total = total * decay + weights.sum(-1, keepdims=True)
        return new_peak, total, out * decay + weighted(weights, values)

    if num_chunks == 1:
        carry = attend_chunk(0, carry)
    else:
        longest = context_lengths.max()
        first = 0
        if window is not None:
            first = jnp.maximum(context_lengths.min() - window + 1, 0) // chunk
        carry = jax.lax.fori_loop(first, (longest + chunk - 1) // chunk, attend_chunk, carry)

    _, total, out = carry
    return (out / total).transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
