"""Range attention for GPUs (Pallas, Triton lowering): a program takes a tile of queries of one kv
head over the tiles of keys that any of them sees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.platform import chip
from pallas_kernels.product import product, tf32_x3
from pallas_kernels.tiles import check_head_dim, check_sizes, fit_keys
from pallas_kernels.triton_tiles import QueryTile, iota


@dataclasses.dataclass(frozen=True)
class Tiles:
    """``query_rows``: rows (tokens x heads of a group) of a query tile, at most; ``keys`` a step;
    ``warps`` and ``stages`` of a program."""

    query_rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3

    def __post_init__(self):
        check_sizes(self, powers=("keys", "warps"), multiples_of_16=("keys",))


def range_attention(q, k, v, start, stop, *, nothing, tiles: Tiles | None = None, interpret=False):
    """The contract of ``range_attention.api``. Raises ValueError for heads past the kernels'."""
    check_head_dim("range_attention", q.shape[-1], otherwise="reference")
    tiles = tiles or fit_keys(Tiles(), chip().kind, q.shape[-1], q.dtype.itemsize)
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    groups = heads // kv_heads
    tile_tokens = max(1, min(tokens, tiles.query_rows // groups))
    body = functools.partial(
        _kernel,
        tiles=tiles,
        tile_tokens=tile_tokens,
        scale=head_dim**-0.5,
        nothing=nothing,
        float32=tf32_x3(interpret),
    )
    return pl.pallas_call(
        body,
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
        ),
        grid=(pl.cdiv(tokens, tile_tokens), batch * kv_heads),
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="range_attention",
    )(q, k, v, start, stop)


def _kernel(
    q_ref, k_ref, v_ref, start_ref, stop_ref, out_ref, log_ref,
    *, tiles, tile_tokens, scale, nothing, float32,
):  # fmt: skip
    length, kv_heads = k_ref.shape[1:3]
    row, head = lax.div(pl.program_id(1), kv_heads), lax.rem(pl.program_id(1), kv_heads)
    tile = pl.program_id(0)
    query, query_head, real, dim, in_head = QueryTile.of(q_ref, head, kv_heads, tile, tile_tokens)
    q = triton.load(q_ref.at[row, query, query_head, dim], mask=real & in_head, other=0)
    start = triton.load(start_ref.at[row, query], mask=real, other=0)
    stop = triton.load(stop_ref.at[row, query], mask=real, other=0)
    sees = stop > start
    first = jnp.where(sees, start, length).min()
    last = jnp.where(sees, stop, 0).max()

    def step(at, carry):
        peak, total, out = carry
        key = at * tiles.keys + iota(tiles.keys, 0)
        mask = (key < length) & in_head
        keys = triton.load(k_ref.at[row, key, head, dim], mask=mask, other=0)
        values = triton.load(v_ref.at[row, key, head, dim], mask=mask, other=0)
        scores = product(q, keys, transposed=True, float32=float32) * scale
        position = at * tiles.keys + iota(tiles.keys, 1)
        visible = (position >= start) & (position < stop)
        scores = jnp.where(visible, scores, nothing)
        higher = jnp.maximum(peak, scores.max(-1, keepdims=True))
        # A tile that shows a query nothing must not count for it: all its scores are the peak.
        weights = jnp.where(visible, jnp.exp(scores - higher), 0)
        decay = jnp.exp(peak - higher)
        total = total * decay + weights.sum(-1, keepdims=True)
        added = product(weights.astype(values.dtype), values, float32=float32)
        return higher, total, out * decay + added

    carry = (
        jnp.full(query.shape, nothing, jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    begin, end = lax.div(first, tiles.keys), lax.div(last + (tiles.keys - 1), tiles.keys)
    peak, total, out = lax.fori_loop(begin, end, step, carry)
    some = total > 0
    total = jnp.where(some, total, 1)
    place = row, query, query_head
    triton.store(
        out_ref.at[(*place, dim)], (out / total).astype(out_ref.dtype), mask=real & in_head
    )
    log_sum = jnp.where(some, peak + jnp.log(total), nothing)
    triton.store(log_ref.at[place], log_sum, mask=real)
