"""RoPE inverse frequencies from a RopeConfig, as transformers' ``ROPE_INIT_FUNCTIONS`` has them."""

import math

import numpy as np

from dflash_jax.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [H/2] in float32 and the factor on cos and sin."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    base = (1.0 / rope.theta**exponents).astype(np.float32)
    if rope.kind == "default":
        return base, 1.0
    if rope.kind == "linear":
        return (base / rope.factor).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    return _yarn(rope, base, head_dim)


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Long wavelengths are interpolated, short ones kept, those between blended."""
    context = rope.original_max_position_embeddings
    turns = context * base / (2 * np.pi)  # rotations over the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * base / rope.factor + blend * base).astype(np.float32)


def _yarn(rope: RopeConfig, base: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    """NTK-by-parts (arXiv 2309.00071): a linear ramp over dims between two rotation counts."""
    context = rope.original_max_position_embeddings

    def dim_at(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_at(rope.beta_fast), dim_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    frequencies = base / rope.factor * ramp + base * (1 - ramp)
    return frequencies.astype(np.float32), _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
