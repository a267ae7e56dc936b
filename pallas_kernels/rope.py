"""Rotary position embedding in the half-split layout of HF Llama and Qwen, in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def apply_rope(
    x: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    inverse_frequencies: Float[Array, "R"],
    attention_factor: float = 1.0,
) -> Float[Array, "B T K H"]:
    """Rotate the first 2R of H dims by absolute position; the rest pass through.

    ``attention_factor`` scales cos and sin (yarn). Computed in float32, returned in x's dtype.
    """
    half = inverse_frequencies.shape[0]
    angle = positions.astype(jnp.float32)[:, :, None, None] * inverse_frequencies[None, None, None]
    cos, sin = jnp.cos(angle) * attention_factor, jnp.sin(angle) * attention_factor
    first, second, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
