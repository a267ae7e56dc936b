"""Writing rows into pages on a TPU. Its memory is copied by tiles of several rows, so a page is
read, filled with the new rows and written back, all heads at once."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.narrow import to_page_dtype
from pallas_kernels.paging import LANES, sublanes
from pallas_kernels.product import product


def check_pages(op: str, pool: jax.Array) -> None:
    """Raises ValueError for pages that are no whole tiles."""
    page_size, width = pool.shape[2:]
    if width % LANES or page_size % sublanes(pool.dtype):
        raise ValueError(
            f"{op}: implementation 'tpu' writes whole tiles: pages of {page_size} rows, {width} "
            f"wide, must be multiples of {sublanes(pool.dtype)} and {LANES} for {pool.dtype}"
        )


@dataclasses.dataclass(frozen=True)
class Segments:
    """How a batch of B x T rows is cut: a segment is at most ``length`` successive tokens of one
    row, and a program takes ``per_tile`` of them, of different rows, so that no two touch the same
    page. ``pages``: that a segment touches, at most; ``capacity``: of a row's page table."""

    batch: int
    tokens: int
    length: int
    per_tile: int
    page_size: int
    capacity: int

    @classmethod
    def of(cls, batch: int, tokens: int, rows: int, page_size: int, capacity: int) -> "Segments":
        """Tiles of about ``rows`` tokens, a multiple of 16."""
        length = min(rows, pl.align_to(tokens, 16))
        per_tile = min(max(1, rows // length), batch)
        return cls(batch, tokens, length, per_tile, page_size, capacity)

    @property
    def pieces(self) -> int:
        """Segments of a row."""
        return pl.cdiv(self.tokens, self.length)

    @property
    def rows(self) -> int:
        """Of the batch, filled up to whole tiles."""
        return pl.cdiv(self.batch, self.per_tile) * self.per_tile

    @property
    def num_tiles(self) -> int:
        return self.rows // self.per_tile * self.pieces

    @property
    def pages(self) -> int:
        return (self.length + self.page_size - 2) // self.page_size + 1

    def arrange(self, x: jax.Array, count: jax.Array) -> jax.Array:
        """[B, T, ...] -> [segments, length, ...], zeros in place of all but a row's first
        ``count``: those meet the rows that are written in a product, and must be finite."""
        rest = x.shape[2:]
        live = jnp.arange(self.tokens, dtype=jnp.int32)[None, :] < count[:, None]
        x = jnp.where(live.reshape(*live.shape, *(1 for _ in rest)), x, 0)
        padding = [(0, self.rows - self.batch), (0, self.pieces * self.length - self.tokens)]
        x = jnp.pad(x, padding + [(0, 0)] * len(rest))
        x = x.reshape(self.rows, self.pieces, self.length, *rest).swapaxes(0, 1)
        return x.reshape(-1, self.length, *rest)

    def spans(
        self, page_table: jax.Array, start: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(pages that each segment touches, its start, its count), for the scalar memory, which
        whole tables of long contexts would not fit."""
        spare = self.rows - self.batch
        first = jnp.arange(self.pieces, dtype=jnp.int32)[:, None] * self.length
        starts = (jnp.pad(start, (0, spare))[None, :] + first).reshape(-1)
        counts = jnp.pad(count, (0, spare))[None, :] - first
        counts = jnp.clip(counts, 0, self.length).reshape(-1)
        entry = lax.div(starts, self.page_size)[:, None]
        entry = entry + jnp.arange(self.pages, dtype=jnp.int32)[None, :]
        table = jnp.tile(jnp.pad(page_table, [(0, spare), (0, 0)]), (self.pieces, 1))
        touched = jnp.take_along_axis(table, jnp.minimum(entry, self.capacity - 1), axis=1)
        return touched, starts, counts

    def buffer(self, pool: jax.Array) -> Any:
        """VMEM for the pages of a tile."""
        return pltpu.VMEM((self.per_tile * self.pages, *pool.shape[1:]), pool.dtype)

    def buffer_bytes(self, pool: jax.Array) -> int:
        page = pool.shape[1] * pool.shape[2] * pool.shape[3] * pool.dtype.itemsize
        return self.per_tile * self.pages * page


@dataclasses.dataclass(frozen=True)
class PageWriter:
    """The pages of a tile's segments inside a kernel: copied in, filled, copied out. K and V have a
    buffer and a DMA semaphore each."""

    segments: Segments
    touched: Any
    starts: Any
    counts: Any
    buffers: Sequence[Any]
    semaphores: Any

    def start(self, tile, pools: Sequence[Any], *, out: bool) -> None:
        def of_page(segment, _entry, place):
            index = tile * self.segments.per_tile + segment
            page = self.touched[index, place - segment * self.segments.pages]
            for copy in self._copies(pools, page, place, out):
                copy.start()

        self._for_each(tile, of_page)

    def wait(self, tile, pools: Sequence[Any], *, out: bool) -> None:
        """``pools``: any of the shape that was copied; a wait counts bytes."""

        def of_page(_segment, _entry, place):
            for copy in self._copies(pools, 0, place, out):
                copy.wait()

        self._for_each(tile, of_page)

    def fill(
        self,
        tile,
        rows: Callable[[int, Any, Any, Any], jax.Array],
        scale: Callable[[int, Any], Any] | None = None,
    ) -> None:
        """Put the new rows among each page's old ones. ``rows(which, segment, head, at)`` are the
        rows of a segment's slice ``at`` for K (0) or V (1); ``scale(which, head)`` divides them.

        A product with ones and zeros moves them: they lie at any offset, and vectors are shifted by
        whole tiles only. Rows must be finite, also those that are not written."""
        segments, page_size = self.segments, self.segments.page_size
        kv_heads, width = self.buffers[0].shape[1], self.buffers[0].shape[3]
        # A page's rows are among these many of a segment's, from a whole VMEM tile on.
        near = min(segments.length, pl.align_to(page_size, 16) + 16)

        def of_page(segment, entry, place):
            index = tile * segments.per_tile + segment
            shift, count = entry * page_size - self.starts[index], self.counts[index]
            begin = lax.div(jnp.maximum(shift, 0), 16) * 16
            begin = pl.multiple_of(jnp.clip(begin, 0, segments.length - near), 16)
            slot = lax.broadcasted_iota(jnp.int32, (page_size, near), 0) + shift
            token = lax.broadcasted_iota(jnp.int32, (page_size, near), 1) + begin
            ours = slot == token
            slot = lax.broadcasted_iota(jnp.int32, (page_size, width), 0) + shift
            fresh = (slot >= 0) & (slot < count)

            def of_head(head, _):
                for which, buffer in enumerate(self.buffers):
                    own = rows(which, segment, head, pl.ds(begin, near))
                    new = product(ours.astype(own.dtype), own)
                    if scale is not None:
                        new = new / scale(which, head)
                    old = buffer[place, head].astype(jnp.float32)
                    buffer[place, head] = to_page_dtype(jnp.where(fresh, new, old), buffer.dtype)

            lax.fori_loop(0, kv_heads, of_head, None)

        self._for_each(tile, of_page)

    def _for_each(self, tile, act: Callable[[Any, Any, Any], None]) -> None:
        """``act(segment of the tile, number of the page in its row, its place in the buffers)``."""
        segments, page_size = self.segments, self.segments.page_size

        def of_segment(segment, _):
            index = tile * segments.per_tile + segment
            begin, count = self.starts[index], self.counts[index]
            first = lax.div(begin, page_size)
            last = jnp.minimum(pl.cdiv(begin + count, page_size), segments.capacity)

            def of_page(entry, _):
                act(segment, entry, segment * segments.pages + entry - first)

            lax.fori_loop(first, jnp.where(count > 0, last, first), of_page, None)

        lax.fori_loop(0, segments.per_tile, of_segment, None)

    def _copies(self, pools: Sequence[Any], page, place, out: bool) -> Iterator[Any]:
        for which, (pool, buffer) in enumerate(zip(pools, self.buffers, strict=True)):
            here, there = buffer.at[place], pool.at[page]
            source, target = (here, there) if out else (there, here)
            yield pltpu.make_async_copy(source, target, self.semaphores.at[which])
