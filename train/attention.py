"""Attention over packed rows in tiles: no matrix of all queries by all keys ever exists.

What a query may see of its row is one contiguous range of indices: its document up to itself (the
target) or up to its block's anchor (the draft), less what a sliding window leaves behind. Tiles of
keys outside all ranges of a tile of queries are never read. The backward pass recomputes scores
tile by tile from the saved log-sum-exp (FlashAttention-2, arXiv 2307.08691, sections 3.1 and 3.2).
Letters: Z rows, S tokens a row, T queries a row; N = K * G query heads.
"""

from functools import partial
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels
from dflash_jax.layers import Attend
from pallas_kernels.range_attention.api import NOTHING
from train.rows import PackedRows
from train.stacked import KV, BlockAttend


class Ranges(NamedTuple):
    """Query t of row z sees keys start <= s < stop of its row."""

    start: Int[Array, "Z T"]
    stop: Int[Array, "Z T"]


class Tiles(NamedTuple):
    """Most queries and keys whose scores exist at a time, of every row and head."""

    queries: int = 1024
    keys: int = 1024


TILES = Tiles()


Forward = Literal["tiles", "reference", "gpu"]
"""How the forward pass runs: in ``Tiles``, or by an implementation of
``pallas_kernels.range_attention``. The backward pass runs in tiles."""


def forward_on(mesh: Mesh) -> Forward:
    """The kernel on one GPU; a mesh of several would have to gather a kernel's operands."""
    alone = mesh.devices.size == 1 and mesh.devices.flat[0].platform == "gpu"
    return "gpu" if alone else "tiles"


def causal_ranges(rows: PackedRows) -> Ranges:
    """Every token sees its own document up to itself; padding sees nothing."""
    index = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None, :]
    real = rows.segments > 0
    return Ranges(
        jnp.where(real, index - rows.positions, 0), jnp.where(real, index + 1, jnp.int32(0))
    )


def block_ranges(
    rows: PackedRows, anchors: Int[Array, "Z A"], block_size: int, window: int | None
) -> Ranges:
    """Every slot of a block sees the context features strictly before the anchor, whose own
    feature does not exist at inference; slot o under a window W only keys > anchor + o - W."""
    first = anchors - jnp.take_along_axis(rows.positions, anchors, axis=1)
    offset = jnp.arange(block_size, dtype=jnp.int32)[None, None, :]
    start = jnp.broadcast_to(first[:, :, None], (*anchors.shape, block_size))
    if window is not None:
        start = jnp.maximum(start, anchors[:, :, None] + offset - (window - 1))
    stop = jnp.broadcast_to(anchors[:, :, None], start.shape)
    flat = (anchors.shape[0], -1)
    return Ranges(jnp.minimum(start, stop).reshape(flat), stop.reshape(flat))


def range_attention(
    q: Float[Array, "Z T N H"],
    k: Float[Array, "Z S K H"],
    v: Float[Array, "Z S K H"],
    ranges: Ranges,
    tiles: Tiles = TILES,
    forward: Forward = "tiles",
) -> tuple[Float[Array, "Z T N H"], Float[Array, "Z T N"]]:
    """(softmax(q k / sqrt(H)) v over each query's range, log-sum-exp of its scores in float32).

    A query whose range is empty gets zeros and ``NOTHING``.
    """
    return cast(tuple[Array, Array], _range_attention(q, k, v, ranges, tiles, forward))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _range_attention(q, k, v, ranges: Ranges, tiles: Tiles, forward: Forward):
    return _forward(q, k, v, ranges, tiles, forward)


def _forward(q, k, v, ranges: Ranges, tiles: Tiles, forward: Forward):
    if forward != "tiles":
        return kernels.range_attention(q, k, v, *ranges, implementation=forward)
    grid = _Grid(q, k, tiles)
    k, v = grid.keys(k), grid.keys(v)

    def one_tile(tile):
        query, start, stop = tile  # [Z, K, G, t, H], [Z, t], [Z, t]
        shape = query.shape[:-1]

        def visit(i, carry):
            best, total, out = carry
            scores, visible = grid.scores(query, grid.tile(k, i), start, stop, i)
            higher = jnp.maximum(best, scores.max(-1))
            weights = jnp.where(visible, jnp.exp(scores - higher[..., None]), 0.0)
            keep = jnp.exp(best - higher)
            added = jnp.einsum(
                "ZKGTS,ZSKH->ZKGTH",
                weights.astype(v.dtype),
                grid.tile(v, i),
                preferred_element_type=jnp.float32,
            )
            return higher, total * keep + weights.sum(-1), out * keep[..., None] + added

        empty = (
            jnp.full(shape, NOTHING, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(query.shape, jnp.float32),
        )
        best, total, out = grid.visit_live(start, stop, visit, empty)
        out = out / jnp.maximum(total, 1e-30)[..., None]
        log_sum = jnp.where(total > 0, best + jnp.log(jnp.maximum(total, 1e-30)), NOTHING)
        return out.astype(query.dtype), log_sum

    out, log_sum = grid.map(one_tile, (grid.queries(q), *grid.of_queries(ranges)))
    return grid.join(out), grid.join(log_sum[..., None])[..., 0]


def _forward_saving(q, k, v, ranges, tiles, forward):
    out, log_sum = _forward(q, k, v, ranges, tiles, forward)
    return (out, log_sum), (q, k, v, ranges, out, log_sum)


def _backward(tiles: Tiles, _: Forward, saved, cotangents):
    q, k, v, ranges, out, log_sum = saved
    d_out, d_log_sum = cotangents
    grid = _Grid(q, k, tiles)
    keys, values = grid.keys(k), grid.keys(v)
    # d score = weight * (d_out . v - d_out . out + d_log_sum): the last two are a query's own.
    own = d_log_sum - (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    wide = {"preferred_element_type": jnp.float32}

    def one_tile(sums, tile):
        query, d_query_out, query_log_sum, query_own, start, stop = tile
        query_log_sum, query_own = query_log_sum[..., 0], query_own[..., 0]

        def visit(i, carry):
            d_query, d_keys, d_values = carry
            key, value = grid.tile(keys, i), grid.tile(values, i)
            scores, visible = grid.scores(query, key, start, stop, i)
            weights = jnp.where(visible, jnp.exp(scores - query_log_sum[..., None]), 0.0)
            d_weights = jnp.einsum("ZKGTH,ZSKH->ZKGTS", d_query_out, value, **wide)
            d_scores = weights * (d_weights + query_own[..., None]) * grid.scale
            d_scores = d_scores.astype(query.dtype)
            d_query += jnp.einsum("ZKGTS,ZSKH->ZKGTH", d_scores, key, **wide)
            d_key = jnp.einsum("ZKGTS,ZKGTH->ZSKH", d_scores, query, **wide)
            d_value = jnp.einsum(
                "ZKGTS,ZKGTH->ZSKH", weights.astype(query.dtype), d_query_out, **wide
            )
            return d_query, grid.add(d_keys, i, d_key), grid.add(d_values, i, d_value)

        zeros = jnp.zeros(query.shape, jnp.float32)
        d_query, *sums = grid.visit_live(start, stop, visit, (zeros, *sums))
        return tuple(sums), d_query.astype(query.dtype)

    zeros = jnp.zeros(keys.shape, jnp.float32)
    operands = (
        grid.queries(q),
        grid.queries(d_out),
        grid.queries(log_sum[..., None]),
        grid.queries(own[..., None]),
        *grid.of_queries(ranges),
    )
    (d_k, d_v), d_q = grid.scan(one_tile, (zeros, zeros), operands)
    length = k.shape[1]
    return grid.join(d_q), d_k[:, :length].astype(k.dtype), d_v[:, :length].astype(v.dtype), None


_range_attention.defvjp(_forward_saving, _backward)


class _Grid:
    """How one call is cut: tiles of queries, one after the other, over live tiles of keys."""

    def __init__(self, q: Array, k: Array, tiles: Tiles):
        self.length, self.kv_heads, dim = q.shape[1], k.shape[2], q.shape[3]
        self.query_tile = min(tiles.queries, q.shape[1])
        self.key_tile = min(tiles.keys, k.shape[1])
        self.key_tiles = -(-k.shape[1] // self.key_tile)
        self.scale = jnp.float32(dim**-0.5)

    def _padded(self, x: Array, size: int) -> Array:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)) + ((0, 0),) * (x.ndim - 2))

    def keys(self, x: Float[Array, "Z S K H"]) -> Array:
        return self._padded(x, self.key_tile)

    def queries(self, x: Float[Array, "Z T N H"]) -> Float[Array, "n Z K G t H"]:
        x = self._padded(x, self.query_tile)
        x = x.reshape(x.shape[0], -1, self.query_tile, self.kv_heads, x.shape[2] // self.kv_heads,
                      x.shape[3])  # fmt: skip
        return x.transpose(1, 0, 3, 4, 2, 5)

    def of_queries(self, ranges: Ranges) -> tuple[Array, Array]:
        def cut(x: Int[Array, "Z T"]) -> Int[Array, "n Z t"]:
            x = self._padded(x, self.query_tile)  # start = stop = 0: padding sees nothing
            return x.reshape(x.shape[0], -1, self.query_tile).swapaxes(0, 1)

        return cut(ranges.start), cut(ranges.stop)

    def join(self, x: Float[Array, "n Z K G t H"]) -> Float[Array, "Z T N H"]:
        x = x.transpose(1, 0, 4, 2, 3, 5)
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2], -1, x.shape[5])[:, : self.length]

    def tile(self, x: Float[Array, "Z S K H"], i) -> Float[Array, "Z s K H"]:
        return jax.lax.dynamic_slice_in_dim(x, i * self.key_tile, self.key_tile, axis=1)

    def add(self, x: Array, i, value: Array) -> Array:
        total = self.tile(x, i) + value
        return jax.lax.dynamic_update_slice_in_dim(x, total, i * self.key_tile, axis=1)

    def scores(self, query: Array, key: Array, start: Array, stop: Array, i):
        """(scores in float32 with ``NOTHING`` where unseen, what is seen), both [Z, K, G, t, s]."""
        index = i * self.key_tile + jnp.arange(self.key_tile, dtype=jnp.int32)[None, None, :]
        visible = (index >= start[:, :, None]) & (index < stop[:, :, None])
        visible = visible[:, None, None]
        scores = jnp.einsum("ZKGTH,ZSKH->ZKGTS", query, key, preferred_element_type=jnp.float32)
        return jnp.where(visible, scores * self.scale, NOTHING), visible

    def visit_live(self, start: Array, stop: Array, visit, carry):
        """Fold ``visit`` over the tiles of keys that some query of the tile sees."""
        if self.key_tiles == 1:
            return visit(0, carry)
        seeing = stop > start
        first = jnp.where(seeing, start, self.key_tiles * self.key_tile).min() // self.key_tile
        last = -(-jnp.where(seeing, stop, 0).max() // self.key_tile)
        return jax.lax.fori_loop(first, last, visit, carry)

    def map(self, one_tile, operands):
        if operands[0].shape[0] == 1:
            return jax.tree.map(lambda x: x[None], one_tile(jax.tree.map(lambda x: x[0], operands)))
        return jax.lax.map(one_tile, operands)

    def scan(self, one_tile, carry, operands):
        if operands[0].shape[0] == 1:
            carry, y = one_tile(carry, jax.tree.map(lambda x: x[0], operands))
            return carry, y[None]
        return jax.lax.scan(one_tile, carry, operands)


def packed_attend(rows: PackedRows, tiles: Tiles = TILES, forward: Forward = "tiles") -> Attend:
    """The ``attend`` of a causal model over packed documents that never see each other."""
    ranges = causal_ranges(rows)

    def attend(_: int, q: Array, k: Array, v: Array) -> Array:
        return range_attention(q, k, v, ranges, tiles, forward)[0]

    return attend


def block_attend(
    rows: PackedRows,
    anchors: Int[Array, "Z A"],
    block_size: int,
    tiles: Tiles,
    forward: Forward,
    window: int | None,
    causal: bool,
) -> BlockAttend:
    """The attention of a draft layer in training, over Z*A blocks of b slots: the context before
    the anchor and the block's own b x b scores, merged by log-sum-exp. Blocks never see each
    other."""
    ranges = block_ranges(rows, anchors, block_size, window)

    def attend(context_kv: KV, q: Array, k: Array, v: Array) -> Array:
        heads, dim = q.shape[2:]
        per_row = (anchors.shape[0], -1, heads, dim)
        context, context_sum = range_attention(
            q.reshape(per_row), *context_kv, ranges, tiles, forward
        )
        own, own_sum = _own_block(q, k, v, causal=causal, window=window)
        context = context.reshape(q.shape).astype(jnp.float32)
        context_sum = context_sum.reshape(q.shape[:-1])
        most = jax.lax.stop_gradient(jnp.maximum(context_sum, own_sum))
        from_context, from_own = jnp.exp(context_sum - most), jnp.exp(own_sum - most)
        total = from_context[..., None] * context + from_own[..., None] * own
        return (total / (from_context + from_own)[..., None]).astype(q.dtype)

    return attend


def _own_block(q, k, v, *, causal: bool, window: int | None):
    """(output, log-sum-exp) of every block's slots over themselves, in float32."""
    blocks, size, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(blocks, size, kv_heads, heads // kv_heads, dim)
    offset = jnp.arange(size, dtype=jnp.int32)
    distance = offset[:, None] - offset[None, :]
    visible = distance >= 0 if causal else jnp.ones_like(distance, bool)
    if window is not None:
        visible &= distance < window
    wide = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("BTKGH,BUKH->BTKGU", grouped, k, **wide) * jnp.float32(dim**-0.5)
    scores = jnp.where(visible[None, :, None, None, :], scores, NOTHING)
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - log_sum[..., None]).astype(v.dtype)
    out = jnp.einsum("BTKGU,BUKH->BTKGH", weights, v, **wide)
    return out.reshape(q.shape), log_sum.reshape(q.shape[:-1])
