"""Block attention for TPUs (Mosaic): live pages are copied to VMEM two chunks deep while the
chunk before is multiplied.

A program is one sequence and one tile of its queries, all kv heads of the shard: a page holds every
head's rows, so one copy feeds them all. The copies of a program's first chunk are started by the
program before it, so that short contexts do not wait for memory one after another.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention.masks import HIDDEN, first_visible
from pallas_kernels.paging import LANES, sublanes
from pallas_kernels.product import product
from pallas_kernels.tiles import check_head_dim, check_sizes


@dataclasses.dataclass(frozen=True)
class Tiles:
    """``query_rows``: rows (tokens x heads of a group) of a query tile, about; ``context``: tokens
    of a context chunk, about (whole pages are taken); ``keys``: in-block keys a step; ``vmem``:
    bytes that the chunks, and the running sums of a query tile, may take, for which the first two
    shrink where kv heads are many."""

    query_rows: int = 256
    context: int = 512
    keys: int = 256
    vmem: int = 8 * 2**20

    def __post_init__(self):
        check_sizes(self, multiples_of_16=("context", "keys"))


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
    """The contract of ``block_attention.api``. Raises ValueError for pages that are no whole VMEM
    tiles and for heads past the kernels'."""
    tiles = tiles or Tiles()
    interpret = pltpu.InterpretParams() if interpret is True else interpret
    batch, tokens, heads, head_dim = q.shape
    kv_heads, page_size, width = k_pages.shape[1:]
    check_head_dim("block_attention", head_dim, otherwise="portable")
    if width % LANES:
        raise ValueError(
            f"block_attention: implementation 'tpu' copies whole vectors: the pages' rows are "
            f"{width} wide and must be a multiple of {LANES} (paging.row_width)"
        )
    if page_size % sublanes(k_pages.dtype):
        raise ValueError(
            f"block_attention: implementation 'tpu' copies whole tiles: page_size {page_size} must "
            f"be a multiple of {sublanes(k_pages.dtype)} for {k_pages.dtype} pages"
        )
    groups = heads // kv_heads
    chunk = min(tiles.context, tiles.vmem // (4 * kv_heads * width * k_pages.dtype.itemsize))
    pages_per_chunk = max(1, min(chunk // page_size, page_table.shape[1]))
    chunk = pages_per_chunk * page_size
    most_rows = min(tiles.query_rows, tiles.vmem // (4 * kv_heads * (width + 2 * LANES)))
    # Queries as [B, tiles, K, rows, H], token-major within a tile; keys and values as [B, K, T, H].
    # The rows of a tile and the keys are filled up to whole VMEM tiles of either dtype.
    tile_tokens = min(max(most_rows // groups // 16 * 16, 16), tokens)
    num_tiles = pl.cdiv(tokens, tile_tokens)
    rows = pl.align_to(tile_tokens * groups, 16)
    key_step = min(tiles.keys, pl.align_to(tokens, 16))
    keys = pl.align_to(tokens, key_step)

    q, k, v = (jnp.pad(x, _widen(4, 3, width - head_dim)) for x in (q, k, v))
    queries = jnp.pad(q, _widen(4, 1, num_tiles * tile_tokens - tokens))
    queries = queries.reshape(batch, num_tiles, tile_tokens, kv_heads, groups, width)
    queries = queries.swapaxes(2, 3).reshape(batch, num_tiles, kv_heads, -1, width)
    queries = jnp.pad(queries, _widen(5, 3, rows - tile_tokens * groups))
    k, v = (jnp.pad(x.swapaxes(1, 2), _widen(4, 2, keys - tokens)) for x in (k, v))

    body = functools.partial(
        _kernel,
        tokens=tokens,
        groups=groups,
        tile_tokens=tile_tokens,
        key_step=key_step,
        causal=causal,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
    )
    per_tile = pl.BlockSpec((1, 1, kv_heads, rows, width), lambda b, i, *_: (b, i, 0, 0, 0))
    per_row = pl.BlockSpec((1, kv_heads, keys, width), lambda b, i, *_: (b, 0, 0, 0))
    pool = pl.BlockSpec(memory_space=pltpu.HBM)
    # Tables come a row at a time, this one's and the next one's: all of a batch's are larger than
    # the scalar memory where contexts are long (64 rows of 131,072 tokens: 2 MiB of its one).
    entries = (1, 1, page_table.shape[1])
    own_table = pl.BlockSpec(entries, lambda b, *_: (b, 0, 0), memory_space=pltpu.SMEM)
    next_table = pl.BlockSpec(
        entries, lambda b, *_: (jnp.minimum(b + 1, batch - 1), 0, 0), memory_space=pltpu.SMEM
    )
    tables = page_table[:, None, :]
    out = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, num_tiles),
            in_specs=[own_table, next_table, per_tile, per_row, per_row, pool, pool],
            out_specs=per_tile,
            scratch_shapes=[
                pltpu.VMEM((2, kv_heads, chunk, width), k_pages.dtype),
                pltpu.VMEM((2, kv_heads, chunk, width), v_pages.dtype),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, width), jnp.float32),
            ],
        ),
        # A program starts the next one's copies: they run in this order, on one core.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=_vmem_limit(kv_heads, rows, keys, width, q.dtype.itemsize, tiles.vmem),
        ),
        interpret=interpret,
        name="block_attention",
    )(context_lengths, k_scale, v_scale, tables, tables, queries, k, v, k_pages, v_pages)
    out = out[:, :, :, : tile_tokens * groups]
    out = out.reshape(batch, num_tiles, kv_heads, tile_tokens, groups, width).swapaxes(2, 3)
    return out.reshape(batch, num_tiles * tile_tokens, heads, width)[:, :tokens, :, :head_dim]


def _vmem_limit(kv_heads, rows, keys, width, itemsize, chunks: int) -> int:
    """The chunks, the sums, the operands (twice: the next program's are on their way) and as much
    again as one head's scores may take."""
    operands = 2 * 2 * kv_heads * (rows + keys) * width * itemsize
    return chunks + 4 * kv_heads * rows * (width + 2 * LANES) + operands + 8 * 2**20


def _widen(ndim: int, axis: int, amount: int) -> list[tuple[int, int]]:
    return [(0, amount if i == axis else 0) for i in range(ndim)]


def _kernel(
    lengths, k_scale, v_scale, own_table, next_table,
    q_ref, k_ref, v_ref, k_pages, v_pages, out_ref,
    k_buffer, v_buffer, semaphores, first_slot, peak_ref, total_ref, out_acc,
    *, tokens, groups, tile_tokens, key_step, causal, window, scale, soft_cap,
):  # fmt: skip
    kv_heads, rows = q_ref.shape[2:4]
    chunk, page_size = k_buffer.shape[2], k_pages.shape[2]
    pages_per_chunk = chunk // page_size
    row, tile = pl.program_id(0), pl.program_id(1)
    num_rows, num_tiles = pl.num_programs(0), pl.num_programs(1)

    def span(row, tile):
        """The chunks that a program's queries see: [first, last)."""
        length = lengths[row]
        first = first_visible(length + tile * tile_tokens, window) // chunk
        return first, jnp.maximum(pl.cdiv(length, chunk), first)

    def for_each_copy(table, row, tile, index, slot, act):
        """The copies of one chunk: its live pages alone."""
        length = lengths[row]
        first = first_visible(length + tile * tile_tokens, window) // page_size
        begin = index * pages_per_chunk

        def copy_page(entry, _):
            page = table[0, 0, entry]
            place = pl.ds(pl.multiple_of((entry - begin) * page_size, page_size), page_size)
            for which, (pool, buffer) in enumerate(((k_pages, k_buffer), (v_pages, v_buffer))):
                act(
                    pltpu.make_async_copy(
                        pool.at[page], buffer.at[slot, :, place], semaphores.at[which, slot]
                    )
                )

        end = jnp.minimum(begin + pages_per_chunk, pl.cdiv(length, page_size))
        lax.fori_loop(jnp.maximum(begin, first), end, copy_page, None)

    def start(table, row, tile, index, slot):
        for_each_copy(table, row, tile, index, slot, lambda copy: copy.start())

    def start_first(table, row, tile, slot):
        """The first chunk of the program (row, tile), if it has one."""
        first, last = span(row, tile)

        @pl.when(first < last)
        def _():
            start(table, row, tile, first, slot)

    @pl.when((row == 0) & (tile == 0))
    def _():
        first_slot[0] = 0
        start_first(own_table, row, tile, 0)

    query = lax.div(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), groups) + tile * tile_tokens
    length = lengths[row]

    def attend(head, keys, values, key_position, exists, k_factor, v_factor):
        """One step of the online softmax. ``key_position`` [1, keys] from the block's start;
        ``exists`` [1, keys]. Values that no query sees must be finite."""
        scores = product(q_ref[0, 0, head], _to(keys, q_ref.dtype), transposed=True)
        scores *= scale * k_factor
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        distance = query - key_position
        visible = exists
        if causal:
            visible = visible & (distance >= 0)
        if window is not None:
            visible = visible & (distance < window)
        scores = jnp.where(visible, scores, HIDDEN)
        old_peak = peak_ref[head, :, :1]
        peak = jnp.maximum(old_peak, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - peak)
        decay = jnp.exp(old_peak - peak)
        total = total_ref[head, :, :1] * decay + weights.sum(-1, keepdims=True)
        peak_ref[head] = jnp.broadcast_to(peak, (rows, LANES))
        total_ref[head] = jnp.broadcast_to(total, (rows, LANES))
        added = product(weights.astype(q_ref.dtype), _to(values, q_ref.dtype))
        out_acc[head] = out_acc[head] * decay + added * v_factor

    def for_each_head(step):
        lax.fori_loop(0, kv_heads, lambda head, _: step(head), None)

    # The block itself, while the first chunk is on its way.
    peak_ref[...] = jnp.full_like(peak_ref, HIDDEN)
    total_ref[...] = jnp.zeros_like(total_ref)
    out_acc[...] = jnp.zeros_like(out_acc)

    def attend_block(step, _):
        begin = pl.multiple_of(step * key_step, key_step)
        position = lax.broadcasted_iota(jnp.int32, (1, key_step), 1) + begin
        place = pl.ds(begin, key_step)

        def of_head(head):
            attend(
                head, k_ref[0, head, place], v_ref[0, head, place], position, position < tokens,
                1.0, 1.0,
            )  # fmt: skip

        for_each_head(of_head)

    last_query = jnp.minimum((tile + 1) * tile_tokens, tokens) if causal else tokens
    begin = first_visible(tile * tile_tokens, window) // key_step
    lax.fori_loop(begin, pl.cdiv(last_query, key_step), attend_block, None)

    # The context, one chunk ahead.
    first, last = span(row, tile)
    slot0 = first_slot[0]
    next_row = row + (tile + 1) // num_tiles
    next_tile = lax.rem(tile + 1, num_tiles)

    def start_next_program(slot):
        @pl.when(next_row == row)
        def _():
            start_first(own_table, next_row, next_tile, slot)

        @pl.when((next_row != row) & (next_row < num_rows))
        def _():
            start_first(next_table, next_row, next_tile, slot)

    def attend_chunk(index, _):
        slot = lax.rem(slot0 + index - first, 2)

        @pl.when(index + 1 < last)
        def _():
            start(own_table, row, tile, index + 1, 1 - slot)

        @pl.when(index + 1 == last)
        def _():
            start_next_program(1 - slot)

        for_each_copy(own_table, row, tile, index, slot, lambda copy: copy.wait())
        begin = index * chunk
        position = lax.broadcasted_iota(jnp.int32, (1, chunk), 1) + begin
        first_seen = first_visible(length + tile * tile_tokens, window)

        @pl.when((begin < first_seen) | (begin + chunk > length))
        def _():
            # What was not copied, or lies past the row's end, may be anything, and 0 * NaN is NaN.
            place = lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) + begin
            seen = (place < length) & (place >= first_seen)

            def clear(head):
                values = v_buffer[slot, head].astype(jnp.float32)
                v_buffer[slot, head] = _to(jnp.where(seen, values, 0), v_buffer.dtype)

            for_each_head(clear)

        def of_head(head):
            attend(
                head, k_buffer[slot, head], v_buffer[slot, head], position - length,
                position < length, k_scale[head], v_scale[head],
            )  # fmt: skip

        for_each_head(of_head)

    lax.fori_loop(first, last, attend_chunk, None)

    @pl.when(first == last)
    def _():
        start_next_program(slot0)

    first_slot[0] = lax.rem(slot0 + last - first, 2)
    out_ref[0, 0] = (out_acc[...] / total_ref[:, :, :1]).astype(out_ref.dtype)


def _to(x, dtype):
    """``x`` in ``dtype``; the narrow types go through float32, the one way that every chip has."""
    return x if x.dtype == dtype else x.astype(jnp.float32).astype(dtype)
