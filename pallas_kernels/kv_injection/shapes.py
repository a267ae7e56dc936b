"""The shapes that KV injection is built for: what compiles in the tests and what is timed."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.paging import row_width


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call: ``batch`` B rows of ``tokens`` T features of ``dim`` D, for ``layers`` L layers of
    ``kv_heads`` K heads of ``head_dim`` H; ``rotary`` dims turn (default all)."""

    batch: int
    tokens: int
    layers: int
    dim: int
    kv_heads: int
    head_dim: int
    rotary: int | None = None
    pages: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    page_dtype: str | None = None

    @property
    def bytes(self) -> int:
        """The least that moves: the weights and features once, the new rows once."""
        item = jnp.dtype(self.dtype).itemsize
        rows, out = self.batch * self.tokens, 2 * self.layers * self.kv_heads * self.head_dim
        page_item = jnp.dtype(self.page_dtype or self.dtype).itemsize
        return item * self.dim * (out + rows) + page_item * rows * out

    @property
    def flops(self) -> int:
        """Of the projections."""
        out = 2 * self.layers * self.kv_heads * self.head_dim
        return 2 * self.batch * self.tokens * self.dim * out

    @property
    def frequencies(self) -> int:
        return (self.rotary or self.head_dim) // 2

    def abstract(self, platform: str, pages: int | None = None) -> tuple:
        """The operands; pools of ``pages`` pages (default one more than the batch's)."""
        of, row = jax.ShapeDtypeStruct, (self.batch,)
        pool = of(
            (
                pages or self.batch * self.pages + 1,
                self.kv_heads,
                self.page_size,
                row_width(self.head_dim, platform),
            ),
            self.page_dtype or self.dtype,
        )
        pools = (pool,) * self.layers
        return (
            of((*row, self.tokens, self.dim), self.dtype),
            of((self.layers, 2, self.kv_heads, self.head_dim, self.dim), self.dtype),
            of((self.layers, self.head_dim), self.dtype),
            pools,
            pools,
            of((*row, self.pages), jnp.int32),
            of(row, jnp.int32),
            of(row, jnp.int32),
        )


SHAPES = {
    # Qwen3-8B's draft: five layers of the target's heads.
    "8b/1x16": Shape(1, 16, 5, 4096, 8, 128),
    "8b/8x16": Shape(8, 16, 5, 4096, 8, 128),
    "8b/32x16": Shape(32, 16, 5, 4096, 8, 128),
    "8b/long/64x16": Shape(64, 16, 5, 4096, 8, 128, pages=8192),
    "8b/1x1024": Shape(1, 1024, 5, 4096, 8, 128),
    "8b/fp8/32x16": Shape(32, 16, 5, 4096, 8, 128, page_size=32, page_dtype="float8_e4m3fn"),
    "8b/int8/32x16": Shape(32, 16, 5, 4096, 8, 128, page_size=32, page_dtype="int8"),
    "smollm2/8x8": Shape(8, 8, 3, 576, 3, 64),
    "smollm2/float32/8x8": Shape(8, 8, 3, 576, 3, 64, dtype="float32"),
    "smollm2/1x256": Shape(1, 256, 3, 576, 3, 64),
    "gpt-oss/8x16": Shape(8, 16, 4, 2880, 8, 64),
    "partial-rotary/8x16": Shape(8, 16, 4, 2048, 2, 256, rotary=64),
}
