"""A KV write for TPUs (Mosaic). XLA's scatter there goes row by row."""

import dataclasses
import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tiles import check_sizes
from pallas_kernels.tpu_pages import PageWriter, Segments, check_pages


@dataclasses.dataclass(frozen=True)
class Tiles:
    """``rows`` that a program writes, about."""

    rows: int = 256

    def __post_init__(self):
        check_sizes(self, multiples_of_16=("rows",))


def kv_write(
    k_pages, v_pages, k, v, page_table, start, count, *, tiles: Tiles | None = None, interpret=False
):
    """The contract of ``kv_write.api``. Raises ValueError for pages that are no whole tiles."""
    tiles = tiles or Tiles()
    interpret = pltpu.InterpretParams() if interpret is True else interpret
    check_pages("kv_write", k_pages)
    batch, tokens, kv_heads, head_dim = k.shape
    page_size, width = k_pages.shape[2:]
    segments = Segments.of(batch, tokens, tiles.rows, page_size, page_table.shape[1])

    def arrange(rows):
        rows = jnp.pad(rows, [(0, 0)] * 3 + [(0, width - head_dim)])
        return segments.arrange(rows, count).swapaxes(1, 2)

    block = (segments.per_tile, kv_heads, segments.length, width)
    new_rows = pl.BlockSpec(block, lambda tile, *_: (tile, 0, 0, 0))
    pool = pl.BlockSpec(memory_space=pltpu.HBM)
    operands = (*segments.spans(page_table, start, count), arrange(k), arrange(v))
    return pl.pallas_call(
        functools.partial(_kernel, segments=segments),
        out_shape=(k_pages, v_pages),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(segments.num_tiles,),
            in_specs=[new_rows, new_rows, pool, pool],
            out_specs=[pool, pool],
            scratch_shapes=[
                segments.buffer(k_pages),
                segments.buffer(v_pages),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={len(operands): 0, len(operands) + 1: 1},
        compiler_params=pltpu.CompilerParams(
            # Two pieces of one row may touch the same page: one after the other.
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=(
                4 * segments.per_tile * kv_heads * segments.length * width * k.dtype.itemsize
                + 2 * segments.buffer_bytes(k_pages)
                + 8 * 2**20
            ),
        ),
        interpret=interpret,
        name="kv_write",
    )(*operands, k_pages, v_pages)


def _kernel(
    touched, starts, counts, k_rows, v_rows, _k, _v, k_pages, v_pages,
    k_buffer, v_buffer, semaphores, *, segments,
):  # fmt: skip
    tile, pools = pl.program_id(0), (k_pages, v_pages)
    writer = PageWriter(segments, touched, starts, counts, (k_buffer, v_buffer), semaphores)

    def rows(which, segment, head, at):
        return (k_rows, v_rows)[which][segment, head, at]

    writer.start(tile, pools, out=False)
    writer.wait(tile, pools, out=False)
    writer.fill(tile, rows)
    writer.start(tile, pools, out=True)
    writer.wait(tile, pools, out=True)
