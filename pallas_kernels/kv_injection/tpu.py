"""KV injection for TPUs (Mosaic): a program makes one head's K and V of a layer for a tile of rows;
the last head's program writes the layer's rows into their pages. The reads of a layer's pages run
beside its matrix products."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.product import product
from pallas_kernels.tiles import check_sizes
from pallas_kernels.tpu_pages import PageWriter, Segments, check_pages


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
    check_pages("kv_injection", k_pages[0])
    batch, tokens, dim = features.shape
    layers = len(k_pages)
    _, kv_heads, page_size, width = k_pages[0].shape
    head_dim = k_norms.shape[1]
    segments = Segments.of(batch, tokens, tiles.rows, page_size, page_table.shape[1])
    rows = segments.arrange(features, count).reshape(-1, dim)
    spans = segments.spans(page_table, start, count)

    # RoPE as x cos + (x shifted left) sin_left + (x shifted right) sin_right, over whole vectors.
    half = inverse_frequencies.shape[0]
    token = jnp.arange(segments.length, dtype=jnp.int32)
    position = (spans[1][:, None] + token[None, :]).reshape(-1, 1)
    angle = position.astype(jnp.float32) * inverse_frequencies[None, :]
    cos, sin = jnp.cos(angle) * attention_factor, jnp.sin(angle) * attention_factor

    def lanes(x, left, fill=0.0):
        padding = [(0, 0), (left, width - left - x.shape[1])]
        return jnp.pad(x, padding, constant_values=fill)

    turns = lanes(jnp.concatenate([cos, cos], 1), 0, 1.0), lanes(-sin, 0), lanes(sin, half)
    if width != head_dim:  # a copy of the weights, which are small where heads are
        weights = jnp.pad(weights, [(0, 0)] * 3 + [(0, width - head_dim), (0, 0)])
    norms = lanes(k_norms.astype(jnp.float32), 0)[:, None, :]

    tile_rows = segments.per_tile * segments.length
    per_head = pl.BlockSpec((tile_rows, width), lambda i, layer, k, *_: (i, 0))
    pool = pl.BlockSpec(memory_space=pltpu.HBM)
    pools = (*k_pages, *v_pages)
    operands = (*spans, k_scales, v_scales, rows, weights, weights, norms, *turns)
    new_rows = pltpu.VMEM((kv_heads, tile_rows, width), features.dtype)
    new = pl.pallas_call(
        functools.partial(
            _kernel,
            layers=layers,
            head_dim=head_dim,
            half=half,
            segments=segments,
            eps=eps,
        ),
        out_shape=pools,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(segments.num_tiles, layers, kv_heads),
            in_specs=[
                pl.BlockSpec((tile_rows, dim), lambda i, layer, k, *_: (i, 0)),
                pl.BlockSpec((1, 1, 1, width, dim), lambda i, layer, k, *_: (layer, 0, k, 0, 0)),
                pl.BlockSpec((1, 1, 1, width, dim), lambda i, layer, k, *_: (layer, 1, k, 0, 0)),
                pl.BlockSpec((1, 1, width), lambda i, layer, k, *_: (layer, 0, 0)),
                *[per_head] * 3,
                *[pool] * len(pools),
            ],
            out_specs=[pool] * len(pools),
            scratch_shapes=[
                new_rows,
                new_rows,
                segments.buffer(k_pages[0]),
                segments.buffer(v_pages[0]),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={len(operands) + i: i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            vmem_limit_bytes=(
                2 * (tile_rows + 2 * width) * dim * features.dtype.itemsize
                + 2 * kv_heads * tile_rows * width * features.dtype.itemsize
                + 2 * segments.buffer_bytes(k_pages[0])
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
    layers, head_dim, half, segments, eps,
):  # fmt: skip
    pools, scratch = rest[2 * layers : 4 * layers], rest[4 * layers :]  # the results alone
    k_rows, v_rows, k_buffer, v_buffer, semaphores = scratch
    _, kv_heads, _, width = pools[0].shape
    tile, layer, head = (pl.program_id(axis) for axis in range(3))
    writer = PageWriter(segments, touched, starts, counts, (k_buffer, v_buffer), semaphores)
    any_pools = pools[0], pools[layers]

    def start(*, out: bool):
        # A layer's pools are two of many arrays, which no index can choose between.
        for number in range(layers):
            own = pools[number], pools[layers + number]
            pl.when(layer == number)(functools.partial(writer.start, tile, own, out=out))

    @pl.when(head == 0)
    def _():
        @pl.when((tile > 0) | (layer > 0))
        def _():
            writer.wait(jnp.where(layer > 0, tile, tile - 1), any_pools, out=True)

        start(out=False)

    x = x_ref[...]
    k = product(x, k_weight[0, 0, 0], transposed=True)
    k *= lax.rsqrt(jnp.square(k).sum(-1, keepdims=True) / head_dim + eps)
    k *= norm_ref[0]
    left, right = pltpu.roll(k, width - half, 1), pltpu.roll(k, half, 1)
    k = k * cos_ref[...] + left * left_ref[...] + right * right_ref[...]
    k_rows[head] = k.astype(k_rows.dtype)
    v_rows[head] = product(x, v_weight[0, 0, 0], transposed=True).astype(v_rows.dtype)

    def rows(which, segment, head, at):
        begin = pl.multiple_of(segment * segments.length + at.start, 16)
        return (k_rows, v_rows)[which][head, pl.ds(begin, at.size)]

    def scale(which, head):
        return (k_scales, v_scales)[which][layer, head]

    @pl.when(head == kv_heads - 1)
    def _():
        writer.wait(tile, any_pools, out=False)
        writer.fill(tile, rows, scale)
        start(out=True)

        @pl.when((tile == pl.num_programs(0) - 1) & (layer == layers - 1))
        def _():
            writer.wait(tile, any_pools, out=True)
