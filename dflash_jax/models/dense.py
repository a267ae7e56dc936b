"""The dense decoder of Llama 3.x and Qwen3, with taps on its residual stream."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import TargetConfig
from dflash_jax.layers import Attend, Block, Linear, RMSNorm, param


class TargetOutput(NamedTuple):
    """``hidden``: after the final norm. ``features``: the taps, concatenated by ascending id."""

    hidden: Float[Array, "B T D"]
    features: Float[Array, "B T nD"]


class Embedding(nnx.Module):
    def __init__(self, vocab: int, dim: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.weight = param(rngs, (vocab, dim), ("vocab", "embed"), dtype)


class Trunk(nnx.Module):
    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs, dtype=dtype)
        self.layers = nnx.List(
            Block(config, qk_norm=config.qk_norm, rngs=rngs, dtype=dtype)
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, rngs=rngs, dtype=dtype)


class DenseTarget(nnx.Module):
    """A causal language model; tensor names are those of HF ``LlamaForCausalLM``."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.model = Trunk(config, rngs=rngs, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config.hidden_size, config.vocab_size, ("embed", "vocab"), rngs=rngs, dtype=dtype
            )
        self.config = config

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token embeddings. Ids out of range are clipped; callers check them at the door."""
        return jnp.take(self.model.embed_tokens.weight[...], tokens, axis=0, mode="clip")

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        taps: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run ``tokens`` at absolute ``positions``.

        ``taps``: layer ids whose output residual (HF ``hidden_states[id + 1]``; for the last layer
        the residual before the final norm) is captured.
        """
        x = self.embed(tokens)
        captured = {}
        for i, block in enumerate(self.model.layers):
            x = block(x, positions, attend, i)
            if i in taps:
                captured[i] = x
        features = jnp.concatenate([captured[i] for i in taps], -1) if taps else x[..., :0]
        return TargetOutput(self.model.norm(x), features)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Vocabulary logits of final-normed hidden states, in float32."""
        form, head = self._head()
        return jnp.einsum(f"...D,{form}->...V", hidden, head, preferred_element_type=jnp.float32)

    def hidden_gradient(self, gradient: Float[Array, "... V"]) -> Float[Array, "... D"]:
        """Pull a gradient of the logits back to the hidden states, as a product in the head's own
        dtype: what differentiates ``logits`` would widen the head to float32."""
        form, head = self._head()
        return jnp.einsum(f"...V,{form}->...D", gradient.astype(head.dtype), head)

    def _head(self) -> tuple[str, Array]:
        if self.config.tie_word_embeddings:
            return "VD", self.model.embed_tokens.weight[...]
        return "DV", self.lm_head.kernel[...]
