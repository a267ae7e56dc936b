"""The specification of KV injection: project, norm, rotate, write, a layer at a time."""

import jax
import jax.numpy as jnp

from pallas_kernels.paging import write_rows
from pallas_kernels.rope import apply_rope


def kv_injection(
    features,
    k_weights,
    v_weights,
    k_norms,
    k_pages,
    v_pages,
    page_table,
    start,
    count,
    *,
    inverse_frequencies,
    attention_factor,
    eps,
):
    batch, tokens, _ = features.shape
    positions = start[:, None] + jnp.arange(tokens, dtype=start.dtype)[None, :]
    new_k, new_v = [], []
    for k_weight, v_weight, norm, k_pool, v_pool in zip(
        k_weights, v_weights, k_norms, k_pages, v_pages, strict=True
    ):
        heads = (batch, tokens, k_pool.shape[1], norm.shape[0])
        k = _rms_norm((features @ k_weight).reshape(heads), norm, eps)
        k = apply_rope(k, positions, inverse_frequencies, attention_factor)
        v = (features @ v_weight).reshape(heads)
        new_k.append(write_rows(k_pool, k, page_table, start, count))
        new_v.append(write_rows(v_pool, v, page_table, start, count))
    return tuple(new_k), tuple(new_v)


def _rms_norm(x, weight, eps):
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight[None, None, None, :]
