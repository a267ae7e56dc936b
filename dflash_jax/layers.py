"""The layers that target and draft are made of, as flax.nnx modules used functionally.

Attribute paths are the HF tensor names (``self_attn.q_proj``), so a checkpoint maps by name alone;
linear weights are stored [in, out] as ``kernel``. Every parameter is described once, by ``param``:
shape, dtype, logical axes and initialiser; abstract shapes, shardings and restores derive from it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import TransformerConfig
from dflash_jax.rope import rope_frequencies
from dflash_jax.sharding import Axis
from pallas_kernels import apply_rope

Attend = Callable[[int, Array, Array, Array], Array]
"""(layer, q [B,T,N,H], k [B,T,K,H], v [B,T,K,H]) -> [B,T,N,H]: who sees what is the caller's
affair, so one module serves paged decoding, training and a cache-free oracle."""


def param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[Axis, ...],
    dtype: jnp.dtype,
    stddev: float | None = 0.02,
) -> nnx.Param:
    """A weight with logical axes; ``stddev`` None initialises with ones (norms)."""
    if stddev is None:
        value = jnp.ones(shape, dtype)
    else:
        value = (stddev * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
    return nnx.Param(value, logical_axes=axes)


class Linear(nnx.Module):
    """x @ kernel, without bias."""

    def __init__(
        self, n_in: int, n_out: int, axes: tuple[Axis, ...], *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        self.kernel = param(rngs, (n_in, n_out), axes, dtype)

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return x @ self.kernel[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm in float32, weighted in the input's dtype as HF does."""

    def __init__(self, dim: int, eps: float, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.weight = param(rngs, (dim,), (None,), dtype, stddev=None)
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32)
        # The product is rounded once, as in x's dtype; its gradient is summed over all tokens, for
        # which bfloat16 is too narrow.
        normed = wide.astype(x.dtype).astype(jnp.float32)
        return (normed * weight.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(d, f, ("embed", "ffn"), rngs=rngs, dtype=dtype)
        self.up_proj = Linear(d, f, ("embed", "ffn"), rngs=rngs, dtype=dtype)
        self.down_proj = Linear(f, d, ("ffn", "embed"), rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nnx.Module):
    """Projections, optional per-head q/k norm and RoPE; the softmax is the caller's ``attend``."""

    def __init__(
        self, config: TransformerConfig, *, qk_norm: bool, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        d, h = config.hidden_size, config.head_dim
        n, k = config.num_heads * h, config.num_kv_heads * h
        self.q_proj = Linear(d, n, ("embed", ("heads", h)), rngs=rngs, dtype=dtype)
        self.k_proj = Linear(d, k, ("embed", ("kv_heads", h)), rngs=rngs, dtype=dtype)
        self.v_proj = Linear(d, k, ("embed", ("kv_heads", h)), rngs=rngs, dtype=dtype)
        self.o_proj = Linear(n, d, (("heads", h), "embed"), rngs=rngs, dtype=dtype)
        if qk_norm:
            self.q_norm = RMSNorm(h, config.rms_norm_eps, rngs=rngs, dtype=dtype)
            self.k_norm = RMSNorm(h, config.rms_norm_eps, rngs=rngs, dtype=dtype)
        self.qk_norm = qk_norm
        self.config = config

    def query(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]):
        q = self.q_proj(x).reshape(*x.shape[:2], -1, self.config.head_dim)
        return self._rotate(self.q_norm(q) if self.qk_norm else q, positions)

    def key_value(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]):
        k = self.k_proj(x).reshape(*x.shape[:2], -1, self.config.head_dim)
        v = self.v_proj(x).reshape(*x.shape[:2], -1, self.config.head_dim)
        return self._rotate(self.k_norm(k) if self.qk_norm else k, positions), v

    def _rotate(self, x, positions):
        frequencies, factor = rope_frequencies(self.config.rope, self.config.head_dim)
        return apply_rope(x, positions, jnp.asarray(frequencies), factor)

    def output(self, attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))


class Block(nnx.Module):
    """One pre-norm decoder block."""

    def __init__(
        self, config: TransformerConfig, *, qk_norm: bool, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(d, eps, rngs=rngs, dtype=dtype)
        self.self_attn = Attention(config, qk_norm=qk_norm, rngs=rngs, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(d, eps, rngs=rngs, dtype=dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(self, x, positions, attend: Attend, layer: int):
        normed = self.input_layernorm(x)
        q = self.self_attn.query(normed, positions)
        k, v = self.self_attn.key_value(normed, positions)
        x = x + self.self_attn.output(attend(layer, q, k, v))
        return x + self.mlp(self.post_attention_layernorm(x))
