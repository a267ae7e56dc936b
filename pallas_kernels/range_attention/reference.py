"""The specification of range attention, with the whole matrix of scores."""

import jax
import jax.numpy as jnp
from jax import lax


def range_attention(q, k, v, start, stop, *, nothing):
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(
        "ZTKGH,ZSKH->ZTKGS",
        grouped,
        k,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ) * jnp.float32(head_dim**-0.5)
    key = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, :]
    visible = (key >= start[..., None]) & (key < stop[..., None])
    scores = jnp.where(visible[:, :, None, None, :], scores, -jnp.inf)
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    some = log_sum > -jnp.inf
    weights = jnp.where(some[..., None], jnp.exp(scores - log_sum[..., None]), 0)
    values = v.astype(jnp.float32)
    out = jnp.einsum("ZTKGS,ZSKH->ZTKGH", weights, values, precision=lax.Precision.HIGHEST)
    log_sum = jnp.where(some, log_sum, nothing)
    return out.reshape(q.shape).astype(q.dtype), log_sum.reshape(q.shape[:-1])
