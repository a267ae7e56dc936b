"""Injection of context features into the draft's KV pages, all draft layers at once."""

from jaxtyping import Array, Float, Int

from pallas_kernels.kv_injection import reference
from pallas_kernels.platform import select

IMPLEMENTATIONS = {"reference": reference.kv_injection}
AUTO = {"cpu": "reference", "gpu": "reference", "tpu": "reference"}


def kv_injection(
    features: Float[Array, "B T D"],
    k_weights: tuple[Float[Array, "D KH"], ...],
    v_weights: tuple[Float[Array, "D KH"], ...],
    k_norms: tuple[Float[Array, "H"], ...],
    k_pages: tuple[Float[Array, "P K page W"], ...],
    v_pages: tuple[Float[Array, "P K page W"], ...],
    page_table: Int[Array, "B pages"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    *,
    inverse_frequencies: Float[Array, "R"],
    attention_factor: float,
    eps: float,
    implementation: str = "auto",
) -> tuple[tuple[Float[Array, "P K page W"], ...], tuple[Float[Array, "P K page W"], ...]]:
    """Project features to every layer's K and V and write them to their pages.

    K is RMS-normed per head (float32) and rotated (float32) to its absolute position. Row b's
    first ``count[b]`` features go to positions ``start[b]..``; the others are not written. Returns
    the new (k_pages, v_pages); under jit with donated pools the write is in place.

    Raises ValueError where layer counts or head shapes disagree.
    """
    layers = len(k_weights)
    if not layers == len(v_weights) == len(k_norms) == len(k_pages) == len(v_pages):
        raise ValueError("kv_injection: weights, norms and pages must have one entry a layer")
    for weight, norm, pages in zip(
        (*k_weights, *v_weights), (*k_norms, *k_norms), (*k_pages, *v_pages), strict=True
    ):
        expected = (features.shape[-1], pages.shape[1] * norm.shape[0])
        if weight.shape != expected:
            raise ValueError(f"kv_injection: weight {weight.shape} should be {expected}")
    inject = select("kv_injection", implementation, IMPLEMENTATIONS, AUTO)
    return inject(
        features,
        k_weights,
        v_weights,
        k_norms,
        k_pages,
        v_pages,
        page_table,
        start,
        count,
        inverse_frequencies=inverse_frequencies,
        attention_factor=attention_factor,
        eps=eps,
    )
