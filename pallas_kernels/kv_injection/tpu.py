"""KV injection for TPUs (Mosaic): a program makes one head's K and V of a layer for a tile of rows;
the last head's program writes the layer's rows into their pages.

A page is written as a whole tile: read, filled with the new rows and written back, all heads at
once. The reads of a layer run beside its matrix products.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.narrow import to_page_dtype
from pallas_kernels.paging import LANES, sublanes
from pallas_kernels.tiles import check_sizes


@dataclasses.dataclass(frozen=True)
class Tiles:
    """``rows`` of features a program takes, about: enough for the products to hide the weights'
    way from memory, which is gone once a tile."""

    rows: int = 512

    def __post_init__(self):
        check_sizes(self, multiples_of_16=("rows",))


def kv_injection(
    features, weights, k_norms, k_pages, v_pages, page_table, start, count, k_scales, v_scales,
    *, inverse_frequencies, attention_factor, eps, tiles: Tiles | None = None, interpret=False,
):  # fmt: skip
    """The contract of ``kv_injection.api``. Raises ValueError for pages that are no whole VMEM
    tiles."""
    tiles = tiles or Tiles()
    interpret = pltpu.InterpretParams() if interpret is True else interpret
    batch, tokens, dim = features.shape
    layers = len(k_pages)
    _, kv_heads, page_size, width = k_pages[0].shape
    head_dim, dtype = k_norms.shape[1], k_pages[0].dtype
    if width % LANES or page_size % sublanes(dtype):
        raise ValueError(
            f"kv_injection: implementation 'tpu' writes whole tiles: pages of {page_size} rows, "
            f"{width} wide, must be multiples of {sublanes(dtype)} and {LANES} for {dtype}"
        )
    # Segments: at most `rows` successive tokens of one row; a program takes as many as fit.
    length = min(tiles.rows, pl.align_to(tokens, 16))
    pieces = pl.cdiv(tokens, length)
    per_tile = min(max(1, tiles.rows // length), batch)
    num_tiles = pl.cdiv(batch, per_tile) * pieces
    first = jnp.arange(pieces, dtype=jnp.int32) * length

    def by_segment(x):
        """[B padded, pieces, ...] -> [pieces, B padded, ...], flat: a tile's segments are of
        different rows, so that no two touch the same page."""
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    spare = pl.cdiv(batch, per_tile) * per_tile - batch
    # What is not written must be finite all the same: it meets the rows that are in a product.
    live = jnp.arange(tokens, dtype=jnp.int32)[None, :] < count[:, None]
    rows = jnp.where(live[:, :, None], features, 0)
    rows = jnp.pad(rows, [(0, spare), (0, pieces * length - tokens), (0, 0)])
    rows = by_segment(rows.reshape(batch + spare, pieces, length, dim)).reshape(-1, dim)
    starts, counts = (jnp.pad(x, (0, spare))[:, None] for x in (start, count))
    counts = by_segment(jnp.clip(counts - first[None, :], 0, length))
    starts = by_segment(starts + first[None, :])
    # The pages that a segment touches: whole tables are larger than the scalar memory where
    # contexts are long.
    pages = (length + page_size - 2) // page_size + 1
    entry = lax.div(starts, page_size)[:, None] + jnp.arange(pages, dtype=jnp.int32)[None, :]
    table = jnp.tile(jnp.pad(page_table, [(0, spare), (0, 0)]), (pieces, 1))
    touched = jnp.take_along_axis(table, jnp.minimum(entry, table.shape[1] - 1), axis=1)

    # RoPE as x cos + (x shifted left) sin_left + (x shifted right) sin_right, over whole vectors.
    half = inverse_frequencies.shape[0]
    position = (starts[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]).reshape(-1, 1)
    angle = position.astype(jnp.float32) * inverse_frequencies[None, :]
    cos, sin = jnp.cos(angle) * attention_factor, jnp.sin(angle) * attention_factor

    def lanes(x, left, fill=0.0):
        padding = [(0, 0), (left, width - left - x.shape[1])]
        return jnp.pad(x, padding, constant_values=fill)

    turns = lanes(jnp.concatenate([cos, cos], 1), 0, 1.0), lanes(-sin, 0), lanes(sin, half)
    if width != head_dim:  # a copy of the weights, which are small where heads are
        weights = weights.reshape(layers, 2, dim, kv_heads, head_dim)
        weights = jnp.pad(weights, [(0, 0)] * 4 + [(0, width - head_dim)])
        weights = weights.reshape(layers, 2, dim, kv_heads * width)
    norms = lanes(k_norms.astype(jnp.float32), 0)[:, None, :]

    tile_rows = per_tile * length
    per_head = pl.BlockSpec((tile_rows, width), lambda i, layer, k, *_: (i, 0))
    pool = pl.BlockSpec(memory_space=pltpu.HBM)
    pools = (*k_pages, *v_pages)
    operands = (touched, starts, counts, k_scales, v_scales, rows, weights, weights, norms, *turns)
    page_buffer = pltpu.VMEM((per_tile * pages, kv_heads, page_size, width), dtype)
    new_rows = pltpu.VMEM((kv_heads, tile_rows, width), features.dtype)
    new = pl.pallas_call(
        functools.partial(
            _kernel,
            layers=layers,
            head_dim=head_dim,
            half=half,
            length=length,
            per_tile=per_tile,
            pages=pages,
            capacity=page_table.shape[1],
            eps=eps,
        ),
        out_shape=pools,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(num_tiles, layers, kv_heads),
            in_specs=[
                pl.BlockSpec((tile_rows, dim), lambda i, layer, k, *_: (i, 0)),
                pl.BlockSpec((1, 1, dim, width), lambda i, layer, k, *_: (layer, 0, 0, k)),
                pl.BlockSpec((1, 1, dim, width), lambda i, layer, k, *_: (layer, 1, 0, k)),
                pl.BlockSpec((1, 1, width), lambda i, layer, k, *_: (layer, 0, 0)),
                *[per_head] * 3,
                *[pool] * len(pools),
            ],
            out_specs=[pool] * len(pools),
            scratch_shapes=[
                new_rows,
                new_rows,
                page_buffer,
                page_buffer,
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={len(operands) + i: i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            vmem_limit_bytes=(
                2 * (tile_rows + 2 * width) * dim * features.dtype.itemsize
                + 2 * kv_heads * tile_rows * width * features.dtype.itemsize
                + 2 * per_tile * pages * kv_heads * page_size * width * dtype.itemsize
                + 16 * 2**20
            ),
        ),
        interpret=interpret,
        name="kv_injection",
    )(*operands, *pools)
    return tuple(new[:layers]), tuple(new[layers:])


def _kernel(
    touched, starts, counts, k_scales, v_scales,
    x_ref, k_weight, v_weight, norm_ref, cos_ref, left_ref, right_ref, *rest,
    layers, head_dim, half, length, per_tile, pages, capacity, eps,
):  # fmt: skip
    pools, scratch = rest[2 * layers : 4 * layers], rest[4 * layers :]  # the results alone
    k_rows, v_rows, k_buffer, v_buffer, semaphores = scratch
    _, kv_heads, page_size, width = pools[0].shape
    tile, layer, head = (pl.program_id(axis) for axis in range(3))
    is_last = (tile == pl.num_programs(0) - 1) & (layer == layers - 1)

    def for_each_page(tile, act):
        """``act(segment of the tile, number of the page in its row, its place in the buffers)``."""

        def of_segment(segment, _):
            index = tile * per_tile + segment
            begin, count = starts[index], counts[index]
            first = lax.div(begin, page_size)
            last = jnp.minimum(pl.cdiv(begin + count, page_size), capacity)

            def of_page(entry, _):
                act(segment, entry, segment * pages + entry - first)

            lax.fori_loop(first, jnp.where(count > 0, last, first), of_page, None)

        lax.fori_loop(0, per_tile, of_segment, None)

    def copies(pools, page, place, out: bool):
        for which, (pool, buffer) in enumerate(zip(pools, (k_buffer, v_buffer), strict=True)):
            here, there = buffer.at[place], pool.at[page]
            source, target = (here, there) if out else (there, here)
            yield pltpu.make_async_copy(source, target, semaphores.at[which])

    def start(tile, out: bool):
        # A layer's pools are two of many arrays, which no index can choose between.
        for number in range(layers):
            own = pools[number], pools[layers + number]

            @pl.when(layer == number)
            def _(own=own):
                def start_page(segment, _entry, place):
                    page = touched[tile * per_tile + segment, place - segment * pages]
                    for copy in copies(own, page, place, out):
                        copy.start()

                for_each_page(tile, start_page)

    def wait(tile, out: bool):
        def wait_page(_segment, _entry, place):  # which page of which pool does not matter
            for copy in copies((pools[0], pools[layers]), 0, place, out):
                copy.wait()

        for_each_page(tile, wait_page)

    @pl.when(head == 0)
    def _():
        @pl.when((tile > 0) | (layer > 0))
        def _():
            wait(jnp.where(layer > 0, tile, tile - 1), out=True)

        start(tile, out=False)

    x = x_ref[...]
    k = _dot(x, k_weight[0, 0])
    k *= lax.rsqrt(jnp.square(k).sum(-1, keepdims=True) / head_dim + eps)
    k *= norm_ref[0]
    left, right = pltpu.roll(k, width - half, 1), pltpu.roll(k, half, 1)
    k = k * cos_ref[...] + left * left_ref[...] + right * right_ref[...]
    k_rows[head] = k.astype(k_rows.dtype)
    v_rows[head] = _dot(x, v_weight[0, 0]).astype(v_rows.dtype)

    # A page's rows are among these many of a segment's, from a whole VMEM tile on.
    near = min(length, pl.align_to(page_size, 16) + 16)

    def fill_page(segment, entry, place):
        """Put the new rows of one page among its old ones. A product with ones and zeros moves
        them: they lie at any offset, and vectors are shifted by whole tiles only."""
        index = tile * per_tile + segment
        shift, count = entry * page_size - starts[index], counts[index]
        begin = jnp.clip(lax.div(jnp.maximum(shift, 0), 16) * 16, 0, length - near)
        slot = lax.broadcasted_iota(jnp.int32, (page_size, near), 0) + shift
        token = lax.broadcasted_iota(jnp.int32, (page_size, near), 1) + begin
        ours = (slot == token).astype(k_rows.dtype)
        slot = lax.broadcasted_iota(jnp.int32, (page_size, width), 0) + shift
        fresh = (slot >= 0) & (slot < count)
        at = pl.ds(pl.multiple_of(segment * length + begin, 16), near)

        def of_head(head, _):
            for rows, buffer, scales in (
                (k_rows, k_buffer, k_scales),
                (v_rows, v_buffer, v_scales),
            ):
                new = _dot(ours, rows[head, at]) / scales[layer, head]
                old = buffer[place, head].astype(jnp.float32)
                buffer[place, head] = to_page_dtype(jnp.where(fresh, new, old), buffer.dtype)

        lax.fori_loop(0, kv_heads, of_head, None)

    @pl.when(head == kv_heads - 1)
    def _():
        wait(tile, out=False)
        for_each_page(tile, fill_page)
        start(tile, out=True)

        @pl.when(is_last)
        def _():
            wait(tile, out=True)


def _dot(a, b):
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
