"""Attention in which every query sees one contiguous range of keys: what training over packed
documents needs, forward."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paging import check_int32, check_not_empty
from pallas_kernels.platform import select
from pallas_kernels.range_attention import gpu, reference

IMPLEMENTATIONS = {"reference": reference.range_attention, "gpu": gpu.range_attention}
AUTO = {"cpu": "reference", "gpu": "gpu", "tpu": "reference"}
KERNELS: dict[str, type] = {"gpu": gpu.Tiles}
DTYPES = (jnp.bfloat16, jnp.float32)
NOTHING = -1e30
"""Log-sum-exp of a query that sees nothing: finite, so that merging it has finite gradients."""


def range_attention(
    q: Float[Array, "Z T N H"],
    k: Float[Array, "Z S K H"],
    v: Float[Array, "Z S K H"],
    start: Int[Array, "Z T"],
    stop: Int[Array, "Z T"],
    *,
    implementation: str = "auto",
    tiles: gpu.Tiles | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "Z T N H"], Float[Array, "Z T N"]]:
    """(softmax(q k / sqrt(H)) v over the keys ``start <= s < stop`` of each query, log-sum-exp of
    its scores in float32); zeros and ``NOTHING`` where there are none.

    ``implementation``, ``tiles`` and ``interpret`` are as in ``block_attention``. Not
    differentiable. Raises ValueError where shapes or dtypes disagree.
    """
    (batch, tokens, heads, head_dim), kv_heads = q.shape, k.shape[2]
    check_not_empty("range_attention", q=q, k=k)
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, head_dim):
        raise ValueError(f"range_attention: q {q.shape} does not fit k {k.shape} and v {v.shape}")
    if heads % kv_heads:
        raise ValueError(f"range_attention: {heads} query heads are no multiple of {kv_heads}")
    if not start.shape == stop.shape == (batch, tokens):
        raise ValueError(
            f"range_attention: start {start.shape} and stop {stop.shape} should be "
            f"{(batch, tokens)}"
        )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"range_attention: q {q.dtype}, k {k.dtype}, v {v.dtype} must be one of bfloat16 and "
            "float32"
        )
    check_int32("range_attention", start=start, stop=stop)
    run = select(
        "range_attention", implementation, IMPLEMENTATIONS, AUTO, KERNELS,
        tiles=tiles, interpret=interpret,
    )  # fmt: skip
    start, stop = jnp.maximum(start, 0), jnp.minimum(stop, k.shape[1])
    return run(q, k, v, start, stop, nothing=NOTHING)
