"""The shapes that block attention is built for: what compiles in the tests and what is timed."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.paging import row_width


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call: ``batch`` B rows of ``tokens`` T over ``context`` live tokens each; ``heads`` N,
    ``kv_heads`` K, ``head_dim`` H."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    page_size: int = 16
    dtype: str = "bfloat16"
    page_dtype: str | None = None

    @property
    def pages(self) -> int:
        """Pages of a row."""
        return -(-self.context // self.page_size)

    @property
    def bytes(self) -> int:
        """The least that moves: each live K and V row once, the block's operands and its result."""
        page_item = jnp.dtype(self.page_dtype or self.dtype).itemsize
        item = jnp.dtype(self.dtype).itemsize
        seen = self.context if self.window is None else min(self.context, self.window)
        context = 2 * seen * self.kv_heads * self.head_dim * page_item
        block = 2 * self.tokens * (self.heads + self.kv_heads) * self.head_dim * item
        return self.batch * (context + block)

    @property
    def flops(self) -> int:
        """Of the two products, over the keys that are seen (half of the block's where causal)."""
        seen = self.context if self.window is None else min(self.context, self.window)
        keys = seen + self.tokens / (2 if self.causal else 1)
        return int(4 * self.batch * self.tokens * self.heads * keys * self.head_dim)

    def abstract(self, platform: str, pages: int | None = None) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The operands; pools of ``pages`` pages (default one more than are live)."""
        of = jax.ShapeDtypeStruct
        kv = of((self.batch, self.tokens, self.kv_heads, self.head_dim), self.dtype)
        width = row_width(self.head_dim, platform)
        pool = of(
            (pages or self.batch * self.pages + 1, self.kv_heads, self.page_size, width),
            self.page_dtype or self.dtype,
        )
        return (
            of((self.batch, self.tokens, self.heads, self.head_dim), self.dtype),
            kv,
            kv,
            pool,
            pool,
            of((self.batch, self.pages), jnp.int32),
            of((self.batch,), jnp.int32),
        )


SHAPES = {
    # Qwen3-8B and Llama-3.1-8B have the same heads.
    "8b/verify/32x1024": Shape(32, 16, 32, 8, 128, 1024),
    "8b/verify/32x8192": Shape(32, 16, 32, 8, 128, 8192),
    "8b/verify/8x1024": Shape(8, 16, 32, 8, 128, 1024),
    "8b/verify/1x32768": Shape(1, 16, 32, 8, 128, 32768),
    "8b/draft/32x1024": Shape(32, 16, 32, 8, 128, 1024, causal=False),
    "8b/draft/1x32768": Shape(1, 16, 32, 8, 128, 32768, causal=False),
    "8b/draft-window/8x8192": Shape(8, 16, 32, 8, 128, 8192, causal=False, window=2048),
    "8b/plain/32x1024": Shape(32, 1, 32, 8, 128, 1024),
    "8b/plain/1x32768": Shape(1, 1, 32, 8, 128, 32768),
    "8b/long/64x131072": Shape(64, 16, 32, 8, 128, 131072),
    "8b/prefill/1x1024": Shape(1, 1024, 32, 8, 128, 1024),
    "8b/fp8/32x8192": Shape(32, 16, 32, 8, 128, 8192, page_size=32, page_dtype="float8_e4m3fn"),
    "8b/int8/32x8192": Shape(32, 16, 32, 8, 128, 8192, page_size=32, page_dtype="int8"),
    "smollm2/verify/8x1024": Shape(8, 8, 9, 3, 64, 1024),
    "smollm2/float32/8x1024": Shape(8, 8, 9, 3, 64, 1024, dtype="float32"),
    "smollm2/prefill/1x256": Shape(1, 256, 9, 3, 64, 1024),
    "gpt-oss/verify/8x1024": Shape(8, 16, 64, 8, 64, 1024, window=128),
    "h80/verify/8x1024": Shape(8, 16, 32, 32, 80, 1024),
    "h96/verify/8x1024": Shape(8, 16, 32, 8, 96, 1024),
    "h256/verify/8x1024": Shape(8, 16, 16, 8, 256, 1024, soft_cap=50.0),
}
