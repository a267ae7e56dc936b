"""The specification of KV injection: project, norm, rotate, write, a layer at a time."""

import jax
import jax.numpy as jnp

from pallas_kernels.narrow import to_page_dtype
from pallas_kernels.paging import write_rows
from pallas_kernels.rope import apply_rope


def kv_injection(
    features, weights, k_norms, k_pages, v_pages, page_table, start, count, k_scales, v_scales,
    *, inverse_frequencies, attention_factor, eps,
):  # fmt: skip
    batch, tokens, _ = features.shape
    positions = start[:, None] + jnp.arange(tokens, dtype=start.dtype)[None, :]
    new_k, new_v = [], []
    for layer, (k_pool, v_pool) in enumerate(zip(k_pages, v_pages, strict=True)):

        def project(which, layer=layer):
            return jnp.einsum("btd,khd->btkh", features, weights[layer, which])

        def write(pool, rows, scales, layer=layer):
            if rows.dtype != pool.dtype:
                rows = rows.astype(jnp.float32) / scales[layer][None, None, :, None]
            return write_rows(pool, to_page_dtype(rows, pool.dtype), page_table, start, count)

        k = _rms_norm(project(0), k_norms[layer], eps)
        k = apply_rope(k, positions, inverse_frequencies, attention_factor)
        new_k.append(write(k_pool, k, k_scales))
        new_v.append(write(v_pool, project(1), v_scales))
    return tuple(new_k), tuple(new_v)


def _rms_norm(x, weight, eps):
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight[None, None, None, :]
