"""Attention of training in tiles, against brute force over a dense mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.attention import (
    NOTHING,
    Ranges,
    Tiles,
    block_attend,
    block_ranges,
    causal_ranges,
    packed_attend,
    range_attention,
)
from train.rows import PackedRows

Z, S, K, G, H, B = 2, 23, 2, 3, 8, 4
TILES = [Tiles(), Tiles(5, 4), Tiles(7, 64), Tiles(64, 3)]


def rows_of(*documents: tuple[int, ...]) -> PackedRows:
    segments = np.zeros((len(documents), S), np.int32)
    positions = np.zeros_like(segments)
    for z, lengths in enumerate(documents):
        at = 0
        for number, length in enumerate(lengths, start=1):
            segments[z, at : at + length] = number
            positions[z, at : at + length] = np.arange(length)
            at += length
    tokens = np.zeros_like(segments)
    return PackedRows(*map(jnp.asarray, (tokens, segments, positions, segments > 0)))


ROWS = rows_of((9, 10), (S,))


def draws(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def dense(q, k, v, ranges: Ranges):
    """The definition, with the whole matrix."""
    index = jnp.arange(k.shape[1])[None, None, :]
    visible = (index >= ranges.start[..., None]) & (index < ranges.stop[..., None])
    grouped = q.reshape(*q.shape[:2], K, G, H)
    scores = jnp.einsum("ZTKGH,ZSKH->ZTKGS", grouped, k) / np.float32(np.sqrt(H))
    visible = visible[:, :, None, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    best = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), -1e20))
    weights = jnp.where(visible, jnp.exp(scores - best), 0.0)
    total = weights.sum(-1)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("ZTKGS,ZSKH->ZTKGH", weights, v) / safe[..., None]
    log_sum = jnp.where(total > 0, best[..., 0] + jnp.log(safe), NOTHING)
    return out.reshape(q.shape), log_sum.reshape(q.shape[:-1])


@pytest.mark.parametrize("tiles", TILES)
def test_values_and_gradients_are_those_of_the_dense_matrix(tiles: Tiles) -> None:
    """Log-sum-exp's own gradient included: merging with another part needs it."""
    q, k, v = draws(Z, 17, K * G, H), draws(Z, S, K, H, seed=1), draws(Z, S, K, H, seed=2)
    random = np.random.default_rng(0)
    start = random.integers(0, S, (Z, 17), np.int32)
    stop = np.minimum(start + random.integers(0, 12, (Z, 17), np.int32), S)  # some are empty
    ranges = Ranges(jnp.asarray(start), jnp.asarray(stop))
    assert (start == stop).any()
    weight, other = draws(*q.shape, seed=3), draws(*q.shape[:-1], seed=4)

    def scalar(attention, q, k, v):
        out, log_sum = attention(q, k, v, ranges)
        return (out * weight).sum() + jnp.where(log_sum > NOTHING, log_sum * other, 0.0).sum()

    tiled = partial(range_attention, tiles=tiles)
    for got, expected in zip(tiled(q, k, v, ranges), dense(q, k, v, ranges), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    gradients = [
        jax.jit(jax.grad(partial(scalar, a), argnums=(0, 1, 2)))(q, k, v) for a in (tiled, dense)
    ]
    for got, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=3e-5, atol=3e-5)


def test_ranges_are_the_truth_table() -> None:
    """By brute force over documents, anchors (closer than b, too), offsets and windows."""
    causal = causal_ranges(ROWS)
    segments, positions = np.asarray(ROWS.segments), np.asarray(ROWS.positions)
    for z in range(Z):
        for t in range(S):
            sees = [
                s
                for s in range(S)
                if s <= t and segments[z, s] == segments[z, t] and segments[z, t]
            ]
            assert sees == list(range(int(causal.start[z, t]), int(causal.stop[z, t])))
    anchors = np.array([[0, 1, 8, 9, 11, 18], [0, 5, 6, 13, 21, 22]], np.int32)
    for window in (None, 1, 2, 5, 100):
        ranges = jax.tree.map(
            lambda x: np.asarray(x).reshape(Z, -1, B),
            block_ranges(ROWS, jnp.asarray(anchors), B, window),
        )
        for z, a in np.ndindex(anchors.shape):
            anchor = anchors[z, a]
            for o in range(B):
                query = positions[z, anchor] + o
                sees = [
                    s
                    for s in range(S)
                    if segments[z, s] == segments[z, anchor]
                    and s < anchor
                    and (window is None or positions[z, s] > query - window)
                ]
                assert sees == list(range(ranges.start[z, a, o], ranges.stop[z, a, o]))


def test_causal_attention_of_packed_documents_is_that_of_each_alone() -> None:
    q, k, v = (draws(Z, S, n, H, seed=n) for n in (K * G, K, K))
    out = packed_attend(ROWS, Tiles(6, 5))(0, q, k, v)
    alone = jax.nn.dot_product_attention(q[:, 9:19], k[:, 9:19], v[:, 9:19], is_causal=True)
    np.testing.assert_allclose(out[0, 9:19], alone[0], rtol=2e-5, atol=2e-5)
    assert not out[0, 19:].any()  # padding


@pytest.mark.parametrize(
    ("window", "causal", "tiles"),
    [(None, False, TILES[1]), (3, True, TILES[0]), (6, False, TILES[3]), (None, True, TILES[2])],
)
def test_a_block_attends_to_its_context_and_itself(window, causal, tiles) -> None:
    anchors = jnp.asarray([[0, 3, 9, 10], [0, 7, 9, 22]], jnp.int32)
    q, k, v = (draws(Z * 4, B, n, H, seed=n) for n in (K * G, K, K))
    context = draws(Z, S, K, H, seed=8), draws(Z, S, K, H, seed=9)

    def tiled(q, k, v, context):
        return block_attend(ROWS, anchors, B, tiles, "tiles", window, causal)(context, q, k, v)

    segments, positions = np.asarray(ROWS.segments), np.asarray(ROWS.positions)
    visible = np.zeros((Z * 4, B, S + B), bool)
    for n, o in np.ndindex(Z * 4, B):
        z, anchor = n // 4, int(anchors[n // 4, n % 4])
        for s in range(S):
            near = window is None or positions[z, s] > positions[z, anchor] + o - window
            visible[n, o, s] = segments[z, s] == segments[z, anchor] and s < anchor and near
        for other in range(B):
            near = window is None or o - other < window
            visible[n, o, S + other] = (other <= o or not causal) and near

    def brute(q, k, v, context):
        keys, values = (
            jnp.concatenate([jnp.repeat(c, 4, axis=0), x], 1)
            for c, x in zip(context, (k, v), strict=True)
        )
        mask = jnp.asarray(visible)[:, None]
        return jax.nn.dot_product_attention(q, keys, values, mask=mask)

    weight = draws(*q.shape, seed=5)
    results = [
        jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x) * weight).sum(), argnums=(0, 1, 2, 3)))(
            q, k, v, context
        )
        for f in (tiled, brute)
    ]
    for got, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=3e-5)


def test_dead_tiles_are_never_read() -> None:
    """NaN keys outside every range do not touch the result: their tiles are skipped."""
    q, k, v = draws(1, 4, K * G, H), draws(1, 16, K, H, seed=1), draws(1, 16, K, H, seed=2)
    ranges = Ranges(jnp.full((1, 4), 4, jnp.int32), jnp.full((1, 4), 8, jnp.int32))
    poisoned = k.at[:, :4].set(jnp.nan).at[:, 8:].set(jnp.nan)
    out, _ = range_attention(q, poisoned, v, ranges, Tiles(4, 4))
    np.testing.assert_array_equal(out, range_attention(q, k, v, ranges, Tiles(4, 4))[0])


def test_memory_does_not_grow_with_queries_times_keys() -> None:
    """The compiled forward and backward hold tiles, not [T, S] scores."""

    def loss(q, k, v, ranges):
        return range_attention(q, k, v, ranges, Tiles(64, 64))[0].sum()

    length = 2048
    shapes = [jax.ShapeDtypeStruct((1, length, n, H), jnp.float32) for n in (K * G, K, K)]
    ints = jax.ShapeDtypeStruct((1, length), jnp.int32)
    compiled = (
        jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes, Ranges(ints, ints)).compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.2 * 4 * K * G * length**2
