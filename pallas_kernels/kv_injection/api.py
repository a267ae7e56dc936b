"""Injection of context features into the draft's KV pages, all draft layers at once."""

import jax.numpy as jnp
from jax.experimental.pallas.tpu import InterpretParams
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.kv_injection import gpu, reference, tpu
from pallas_kernels.narrow import NARROW_DTYPES
from pallas_kernels.paging import check_not_empty, check_rows
from pallas_kernels.platform import select

IMPLEMENTATIONS = {
    "reference": reference.kv_injection,
    "tpu": tpu.kv_injection,
    "gpu": gpu.kv_injection,
}
AUTO = {"cpu": "reference", "gpu": "gpu", "tpu": "tpu"}
KERNELS = {"tpu": tpu.Tiles, "gpu": gpu.Tiles}
FEATURE_DTYPES = (jnp.bfloat16, jnp.float32)


def kv_injection(
    features: Float[Array, "B T D"],
    weights: Float[Array, "L 2 K H D"],
    k_norms: Float[Array, "L H"],
    k_pages: tuple[Num[Array, "P K page W"], ...],
    v_pages: tuple[Num[Array, "P K page W"], ...],
    page_table: Int[Array, "B pages"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    *,
    inverse_frequencies: Float[Array, "R"],
    attention_factor: float,
    eps: float,
    k_scales: Float[Array, "L K"] | None = None,
    v_scales: Float[Array, "L K"] | None = None,
    implementation: str = "auto",
    tiles: tpu.Tiles | gpu.Tiles | None = None,
    interpret: bool | InterpretParams = False,
) -> tuple[tuple[Num[Array, "P K page W"], ...], tuple[Num[Array, "P K page W"], ...]]:
    """Project features to every layer's K and V (``weights[l, 0]``, ``[l, 1]``, a head's rows
    together as in a checkpoint) and write them to their pages.

    K is RMS-normed per head (float32) and rotated (float32, the first 2R dims) to its absolute
    position. Row b's first ``count[b]`` features go to positions ``start[b]..``; the others, and
    those past the page table's end, are not written. Returns the new (k_pages, v_pages); under jit
    with donated pools the write is in place. int8 and float8 pages hold the value over its head's
    scale (default 1), clipped to what the type can hold.

    ``implementation``, ``tiles`` and ``interpret`` are as in ``block_attention``.

    Raises ValueError where shapes or dtypes disagree or the implementation does not take them.
    """
    _check(features, weights, k_norms, k_pages, v_pages, page_table, start, count)
    if not 0 < 2 * inverse_frequencies.shape[0] <= k_norms.shape[1]:
        raise ValueError(
            f"kv_injection: {inverse_frequencies.shape[0]} frequencies must turn 2 dims each, and "
            f"at most a head's {k_norms.shape[1]}"
        )
    per_head = (len(k_pages), k_pages[0].shape[1])
    for name, factors in (("k_scales", k_scales), ("v_scales", v_scales)):
        if factors is not None and factors.shape != per_head:
            raise ValueError(f"kv_injection: {name} {factors.shape} should be {per_head}")
    inject = select(
        "kv_injection", implementation, IMPLEMENTATIONS, AUTO, KERNELS,
        tiles=tiles, interpret=interpret,
    )  # fmt: skip
    if k_pages[0].dtype == features.dtype and not k_scales is v_scales is None:
        raise ValueError("kv_injection: k_scales and v_scales are for int8 and float8 pages")
    ones = jnp.ones(per_head, jnp.float32)
    return inject(
        features,
        weights,
        k_norms,
        k_pages,
        v_pages,
        page_table,
        start,
        count,
        ones if k_scales is None else k_scales.astype(jnp.float32),
        ones if v_scales is None else v_scales.astype(jnp.float32),
        inverse_frequencies=inverse_frequencies,
        attention_factor=attention_factor,
        eps=eps,
    )


def _check(features, weights, k_norms, k_pages, v_pages, page_table, start, count) -> None:
    layers, batch, head_dim = len(k_pages), features.shape[0], k_norms.shape[-1]
    check_not_empty("kv_injection", features=features, page_table=page_table)
    if not layers == len(v_pages) == weights.shape[0] == k_norms.shape[0] or layers == 0:
        raise ValueError("kv_injection: weights, norms and pages must have one entry a layer")
    pool = k_pages[0]
    if any((p.shape, p.dtype) != (pool.shape, pool.dtype) for p in (*k_pages, *v_pages)):
        raise ValueError("kv_injection: pages must be alike in every layer")
    expected = (layers, 2, pool.shape[1], head_dim, features.shape[-1])
    if weights.shape != expected:
        raise ValueError(f"kv_injection: weights {weights.shape} should be {expected}")
    if pool.shape[3] < head_dim:
        raise ValueError(f"kv_injection: pages {pool.shape} are narrower than a head's {head_dim}")
    check_rows("kv_injection", batch, page_table, start=start, count=count)
    dtype = features.dtype
    if dtype not in FEATURE_DTYPES or not dtype == weights.dtype == k_norms.dtype:
        raise ValueError(
            f"kv_injection: features {dtype}, weights {weights.dtype}, norms {k_norms.dtype} must "
            "be one of bfloat16 and float32"
        )
    if pool.dtype not in (dtype, *NARROW_DTYPES):
        accepted = ", ".join(str(jnp.dtype(d)) for d in (dtype, *NARROW_DTYPES))
        raise ValueError(
            f"kv_injection: pages {pool.dtype} of {dtype} features must be one of {accepted}"
        )
