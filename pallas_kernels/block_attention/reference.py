"""The specification of block attention: gather every page, mask, softmax."""

import jax
import jax.numpy as jnp


def block_attention(
    q, k, v, k_pages, v_pages, page_table, context_lengths, k_scale, v_scale,
    *, causal, window, scale, soft_cap,
):  # fmt: skip
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    context = page_table.shape[1] * k_pages.shape[2]

    def with_context(pages, scales, block):
        gathered = (
            pages[page_table][..., :head_dim]
            .swapaxes(2, 3)
            .reshape(batch, context, kv_heads, head_dim)
        )
        stored = gathered.astype(jnp.float32) * scales[None, None, :, None]
        return jnp.concatenate([stored, block.astype(jnp.float32)], axis=1)

    keys, values = with_context(k_pages, k_scale, k), with_context(v_pages, v_scale, v)

    slot = jnp.arange(context + tokens)[None, :]
    length = context_lengths[:, None]
    in_block = slot >= context
    key_position = jnp.where(in_block, length + slot - context, slot)  # [B, S+T]
    exists = in_block | (slot < length)
    query_position = length + jnp.arange(tokens)[None, :]  # [B, T]

    distance = query_position[:, :, None] - key_position[:, None, :]
    visible = jnp.broadcast_to(exists[:, None, :], distance.shape)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance < window

    seen = visible.any(axis=1)[:, :, None, None]
    values = jnp.where(seen, values, 0)  # a weight of 0 times NaN would be NaN
    grouped = q.astype(jnp.float32).reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, values)
    return out.reshape(q.shape).astype(q.dtype)
