"""Block attention for GPUs (Pallas, Triton lowering): a program gathers live rows of one kv head,
page by page, for a tile of queries.

At small batch a context is split over several programs; each leaves its share with the log-sum-exp
of its scores, and the shares are merged after.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.block_attention.masks import HIDDEN, first_visible
from pallas_kernels.paging import check_triton_offsets
from pallas_kernels.platform import chip
from pallas_kernels.product import product, tf32_x3
from pallas_kernels.tiles import check_head_dim, check_sizes, fit_keys
from pallas_kernels.triton_tiles import QueryTile, iota


@dataclasses.dataclass(frozen=True)
class Tiles:
    """``query_rows``: rows (tokens x heads of a group) of a query tile, at most; ``keys``: tokens
    of context or block a step; ``programs``: how many the chip wants at once, up to which a context
    is split, into shares of ``split_steps`` steps at least: a share is written in float32 and read
    again; ``warps`` and ``stages`` of a program."""

    query_rows: int = 64
    keys: int = 64
    programs: int = 264
    split_steps: int = 4
    warps: int = 4
    stages: int = 3

    def __post_init__(self):
        check_sizes(self, powers=("keys", "warps"), multiples_of_16=("keys",))


TUNED = {"NVIDIA H200": {"block": Tiles(stages=5), "chunk": Tiles(stages=3)}}
"""By chip (``pallas_kernels.platform``), the best of ``python -m pallas_kernels.bench --tune``: for
blocks that are one step of keys, and for chunks of a prompt. Other chips take the first's, with
fewer keys where they do not fit."""


def default_tiles(kind: str, tokens: int, head_dim: int, dtype) -> Tiles:
    tuned = TUNED.get(kind, TUNED["NVIDIA H200"])
    tiles = tuned["block" if tokens <= tuned["block"].keys else "chunk"]
    return fit_keys(tiles, kind, head_dim, jnp.dtype(dtype).itemsize)


def block_attention(
    q,
    k,
    v,
    k_pages,
    v_pages,
    page_table,
    context_lengths,
    k_scale,
    v_scale,
    *,
    causal,
    window,
    scale,
    soft_cap,
    tiles: Tiles | None = None,
    interpret=False,
):
    """The contract of ``block_attention.api``. Raises ValueError for pools that Triton's offsets do
    not reach and for heads past the kernels'."""
    check_triton_offsets("block_attention", k_pages)
    check_head_dim("block_attention", q.shape[-1], otherwise="portable")
    tiles = tiles or default_tiles(chip().kind, q.shape[1], q.shape[3], q.dtype)
    batch, tokens, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    groups = heads // kv_heads
    tile_tokens = max(1, min(tokens, tiles.query_rows // groups))
    num_tiles = pl.cdiv(tokens, tile_tokens)
    capacity = page_table.shape[1] * page_size
    wanted = tiles.programs // (batch * kv_heads * num_tiles)
    splits = max(1, min(wanted, capacity // (tiles.split_steps * tiles.keys)))
    body = functools.partial(
        _kernel,
        tiles=tiles,
        tile_tokens=tile_tokens,
        splits=splits,
        causal=causal,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        float32=tf32_x3(interpret),
    )
    share = jax.ShapeDtypeStruct((splits, *q.shape), q.dtype if splits == 1 else jnp.float32)
    weight = jax.ShapeDtypeStruct((splits, *q.shape[:3]), jnp.float32)
    shares, log_weights = pl.pallas_call(
        body,
        out_shape=(share, weight),
        grid=(splits, num_tiles, batch * kv_heads),
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="block_attention",
    )(q, k, v, k_pages, v_pages, page_table, context_lengths, k_scale, v_scale)
    return shares[0] if splits == 1 else _merge(shares, log_weights, q.dtype, interpret)


def _merge(shares, log_weights, dtype, interpret):
    """Sum [splits, B, T, N, H] shares, each with the weight that its log-sum-exp gives it."""
    splits, *_, head_dim = shares.shape
    chunk = min(32, pl.next_power_of_2(splits))

    def body(share_ref, log_ref, out_ref):
        row = pl.program_id(0)
        dim = iota(pl.next_power_of_2(head_dim), 1)
        in_head = dim < head_dim

        def log_weights_of(first, size):
            split = first + iota(size, 0)
            exists = split < splits
            return split, exists, triton.load(log_ref.at[split, row], mask=exists, other=HIDDEN)

        peak = log_weights_of(0, pl.next_power_of_2(splits))[2].max(0, keepdims=True)

        def add(step, carry):
            total, out = carry
            split, exists, logs = log_weights_of(step * chunk, chunk)
            share = triton.load(share_ref.at[split, row, dim], mask=exists & in_head, other=0)
            weights = jnp.where(exists, jnp.exp(logs - peak), 0)
            total += weights.sum(0, keepdims=True)
            return total, out + (weights * share).sum(0, keepdims=True)

        zeros = jnp.zeros((1, 1), jnp.float32), jnp.zeros((1, dim.shape[1]), jnp.float32)
        total, out = lax.fori_loop(0, pl.cdiv(splits, chunk), add, zeros)
        place = jnp.full((1, 1), row), dim
        triton.store(out_ref.at[place], (out / total).astype(out_ref.dtype), mask=in_head)

    rows = log_weights.size // splits
    merged = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows, head_dim), dtype),
        grid=(rows,),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="merge_shares",
    )(shares.reshape(splits, rows, head_dim), log_weights.reshape(splits, rows))
    return merged.reshape(shares.shape[1:])


def _kernel(
    q_ref, k_ref, v_ref, k_pages, v_pages, page_table, lengths, k_scale, v_scale, out_ref, log_ref,
    *, tiles, tile_tokens, splits, causal, window, scale, soft_cap, float32,
):  # fmt: skip
    tokens = q_ref.shape[1]
    kv_heads, page_size = k_pages.shape[1:3]
    split, tile = pl.program_id(0), pl.program_id(1)
    row, head = lax.div(pl.program_id(2), kv_heads), lax.rem(pl.program_id(2), kv_heads)
    dtype = q_ref.dtype
    query, query_head, real, dim, in_head = QueryTile.of(q_ref, head, kv_heads, tile, tile_tokens)
    q = triton.load(q_ref.at[row, query, query_head, dim], mask=real & in_head, other=0)
    length = lengths[row]

    def attend(carry, keys, values, key_position, exists, factor):
        """One step of the online softmax; ``key_position`` [1, keys] from the block's start."""
        peak, total, out = carry
        scores = product(q, keys.astype(dtype), transposed=True, float32=float32) * factor
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        distance = query - key_position
        visible = exists
        if causal:
            visible = visible & (distance >= 0)
        if window is not None:
            visible = visible & (distance < window)
        scores = jnp.where(visible, scores, HIDDEN)
        new_peak = jnp.maximum(peak, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - new_peak)
        decay = jnp.exp(peak - new_peak)
        total = total * decay + weights.sum(-1, keepdims=True)
        added = product(weights.astype(dtype), values.astype(dtype), float32=float32)
        return new_peak, total, out * decay + added  # which Triton makes one sum, in place

    def attend_block(step, carry):
        key = step * tiles.keys + iota(tiles.keys, 0)
        mask = (key < tokens) & in_head
        keys = triton.load(k_ref.at[row, key, head, dim], mask=mask, other=0)
        values = triton.load(v_ref.at[row, key, head, dim], mask=mask, other=0)
        position = step * tiles.keys + iota(tiles.keys, 1)
        return attend(carry, keys, values, position, position < tokens, scale)

    # Triton turns no integer into a float8.
    nothing = 0 if jnp.issubdtype(k_pages.dtype, jnp.integer) else 0.0
    page_factor = scale * k_scale[head]
    first_seen = first_visible(length + tile * tile_tokens, window)

    def attend_context(step, carry):
        position = step * tiles.keys + iota(tiles.keys, 0)
        # Unread rows are zeros: a weight of 0 times a NaN of an unused page would be NaN.
        seen = (position < length) & (position >= first_seen)
        page = triton.load(page_table.at[row, lax.div(position, page_size)], mask=seen, other=0)
        place = page, head, lax.rem(position, page_size), dim
        keys = triton.load(k_pages.at[place], mask=seen & in_head, other=nothing)
        values = triton.load(v_pages.at[place], mask=seen & in_head, other=nothing)
        position = step * tiles.keys + iota(tiles.keys, 1)
        return attend(carry, keys, values, position - length, position < length, page_factor)

    carry = (
        jnp.full(query.shape, HIDDEN, jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    first, last = first_seen // tiles.keys, pl.cdiv(length, tiles.keys)
    per_split = pl.cdiv(jnp.maximum(last - first, 0), splits)
    begin = first + split * per_split
    end = jnp.minimum(begin + per_split, last)
    peak, total, out = lax.fori_loop(begin, end, attend_context, carry)
    carry = peak, total, out * v_scale[head]

    # The last share, often the shortest, takes the block's own keys.
    is_last = split == splits - 1
    if tokens <= tiles.keys:  # no loop, whose loads would take as many buffers as the context's
        peak, total, out = lax.cond(is_last, lambda c: attend_block(0, c), lambda c: c, carry)
    else:
        last_query = jnp.minimum((tile + 1) * tile_tokens, tokens) if causal else tokens
        begin = jnp.int32(first_visible(tile * tile_tokens, window) // tiles.keys)
        end = jnp.where(is_last, jnp.int32(pl.cdiv(last_query, tiles.keys)), begin)
        peak, total, out = lax.fori_loop(begin, end, attend_block, carry)

    # A share without keys has no sum; its log-weight is so low that it counts for nothing.
    total = jnp.where(total == 0, 1, total)
    place = split, row, query, query_head
    triton.store(
        out_ref.at[(*place, dim)], (out / total).astype(out_ref.dtype), mask=real & in_head
    )
    triton.store(log_ref.at[place], peak + jnp.log(total), mask=real)
