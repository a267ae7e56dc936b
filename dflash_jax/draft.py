"""The DFlash draft: a few bidirectional Qwen3 blocks over injected target features.

Source: the DFlash paper (arXiv 2602.06036), section on KV injection. Embedding and head are the
target's; the draft owns its layers, its norms and the projection of the taps.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import DraftConfig
from dflash_jax.layers import Attend, Block, Linear, RMSNorm


class Draft(nnx.Module):
    """Tensor names are those of HF ``DFlashDraftModel``."""

    def __init__(self, config: DraftConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        d, eps = config.hidden_size, config.rms_norm_eps
        taps = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = Linear(taps, d, (None, "embed"), rngs=rngs, dtype=dtype)
        self.hidden_norm = RMSNorm(d, eps, rngs=rngs, dtype=dtype)
        self.layers = nnx.List(
            Block(config, qk_norm=True, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(d, eps, rngs=rngs, dtype=dtype)
        self.config = config

    def context(self, features: Float[Array, "B T nD"]) -> Float[Array, "B T D"]:
        """The context feature C that every layer's k_proj and v_proj read directly."""
        return self.hidden_norm(self.fc(features))

    def context_kv(self, context: Float[Array, "B T D"], positions: Int[Array, "B T"]):
        """Every layer's K and V of context features, normed and rotated; as injection writes
        them. For training and oracles: decoding injects through ``pallas_kernels``."""
        return tuple(layer.self_attn.key_value(context, positions) for layer in self.layers)

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], attend: Attend
    ) -> Float[Array, "B T D"]:
        """Run one block [anchor, MASK, ...], embedded by the target, at absolute positions.

        Slot k's output, through the target's head, predicts the token AT its own position; slot 0
        is the anchor and predicts nothing. The block's own K and V are not kept.
        """
        for i, block in enumerate(self.layers):
            x = block(x, positions, attend, i)
        return self.norm(x)
