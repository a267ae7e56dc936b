"""The shapes that range attention is built for: what is timed."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call: ``batch`` Z rows of ``tokens`` T, causal in one document; ``heads`` N, ``kv_heads``
    K, ``head_dim`` H."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def bytes(self) -> int:
        """The operands and the result, once each."""
        per_token = (
            2 * (self.heads + self.kv_heads) * self.head_dim * jnp.dtype(self.dtype).itemsize
        )
        return self.batch * self.tokens * per_token

    @property
    def flops(self) -> int:
        """Of the two products, over the keys that are seen."""
        pairs = self.tokens * (self.tokens + 1) // 2
        return 4 * self.batch * pairs * self.heads * self.head_dim

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k, v."""
        rows = (self.batch, self.tokens)
        kv = jax.ShapeDtypeStruct((*rows, self.kv_heads, self.head_dim), self.dtype)
        return jax.ShapeDtypeStruct((*rows, self.heads, self.head_dim), self.dtype), kv, kv


SHAPES = {
    "qwen3-4b/4x3072": Shape(4, 3072, 32, 8, 128),
    "smollm2/16x512": Shape(16, 512, 9, 3, 64),
}
