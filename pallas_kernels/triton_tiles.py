"""What the GPU kernels share inside a program: indices, and the rows of a tile of queries."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


def iota(size: int, axis: int) -> jax.Array:
    """0..size-1 along ``axis`` of two."""
    shape = (size, 1) if axis == 0 else (1, size)
    return lax.broadcasted_iota(jnp.int32, shape, axis)


class QueryTile(NamedTuple):
    """Rows of one kv head's queries, a token's group of heads after the other's: where row r reads
    and writes, [rows, 1], and whether it is there (``real``); ``dim`` [1, dims] and ``in_head``."""

    query: jax.Array
    head: jax.Array
    real: jax.Array
    dim: jax.Array
    in_head: jax.Array

    @classmethod
    def of(cls, q_ref, kv_head, kv_heads: int, tile, tile_tokens: int) -> "QueryTile":
        """Tile number ``tile`` of ``tile_tokens`` tokens of q [B, T, N, H]."""
        _, tokens, heads, head_dim = q_ref.shape
        groups = heads // kv_heads
        # Triton's blocks are powers of two, and its matrix unit takes 16 rows at least.
        dim = iota(max(16, pl.next_power_of_2(head_dim)), 1)
        in_head = dim < head_dim
        index = iota(max(16, pl.next_power_of_2(tile_tokens * groups)), 0)
        query = tile * tile_tokens + lax.div(index, groups)
        real = (index < tile_tokens * groups) & (query < tokens)
        head = kv_head * groups + lax.rem(index, groups)
        return cls(query, head, real, dim, in_head)
