"""KV injection for GPUs (Pallas, Triton lowering).

Few rows: a program makes one head's K, or V, of a layer for all of them, from the projection to the
stores into pages; the weights' way from memory is all that it costs. Many rows: one matrix product
of XLA's projects them for every layer, which no Triton kernel of ours came near, and a program
finishes a tile of rows of one layer's K or V.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.narrow import to_page_dtype
from pallas_kernels.paging import check_triton_offsets
from pallas_kernels.platform import chip
from pallas_kernels.product import product, tf32_x3
from pallas_kernels.tiles import check_sizes
from pallas_kernels.triton_tiles import iota


@dataclasses.dataclass(frozen=True)
class Tiles:
    """``fused_rows``: up to how many rows in all the projection is the kernel's own, where
    ``depth`` divides D; then ``depth`` of D a step, by a program of ``warps`` and ``stages``. Past
    them, a program takes ``rows`` and about ``heads``, which share their rows' cosines and
    sines."""

    fused_rows: int = 64
    depth: int = 64
    warps: int = 4
    stages: int = 6
    rows: int = 16
    heads: int = 2

    def __post_init__(self):
        check_sizes(
            self,
            powers=("rows", "depth", "warps"),
            multiples_of_16=("rows", "depth"),
            may_be_0=("fused_rows",),
        )


TUNED = {"NVIDIA H200": Tiles()}
"""By chip (``pallas_kernels.platform``), the best of ``python -m pallas_kernels.bench --tune``.
On other chips XLA projects from the first row on: finishing needs no shared memory."""


def default_tiles(kind: str, dtype) -> Tiles:
    # A float32 product here takes three passes: XLA's is faster.
    if kind in TUNED and dtype != jnp.float32:
        return TUNED[kind]
    return dataclasses.replace(TUNED["NVIDIA H200"], fused_rows=0)


def kv_injection(
    features, weights, k_norms, k_pages, v_pages, page_table, start, count, k_scales, v_scales,
    *, inverse_frequencies, attention_factor, eps, tiles: Tiles | None = None, interpret=False,
):  # fmt: skip
    """The contract of ``kv_injection.api``. Raises ValueError where Triton's offsets do not reach
    all of a pool."""
    check_triton_offsets("kv_injection", k_pages[0])
    tiles = tiles or default_tiles(chip().kind, features.dtype)
    batch, tokens, dim = features.shape
    layers, kv_heads = len(k_pages), k_pages[0].shape[1]
    num_rows = batch * tokens
    if num_rows <= tiles.fused_rows and dim % tiles.depth == 0:
        rows, heads = max(16, pl.next_power_of_2(num_rows)), 1
        sources, sums_of = (
            (features.reshape(num_rows, dim), weights),
            _projected_by(tiles.depth, tf32_x3(interpret)),
        )
    else:
        rows, heads = tiles.rows, math.gcd(tiles.heads, kv_heads)
        sources, sums_of = (_project(features.reshape(num_rows, dim), weights),), _read
    body = functools.partial(
        _kernel,
        sums_of=sums_of,
        tokens=tokens,
        layers=layers,
        rows=rows,
        heads=heads,
        attention_factor=attention_factor,
        eps=eps,
    )
    # Wide heads need the registers of twice the threads.
    warps = tiles.warps if k_norms.shape[1] <= 128 else 2 * tiles.warps
    pools = (*k_pages, *v_pages)
    operands = (
        k_norms, inverse_frequencies, page_table, start, count, k_scales, v_scales, *sources
    )  # fmt: skip
    new = pl.pallas_call(
        body,
        out_shape=pools,
        grid=(pl.cdiv(num_rows, rows), layers * 2 * kv_heads // heads),
        input_output_aliases={len(operands) + i: i for i in range(len(pools))},
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=tiles.stages),
        interpret=interpret,
        name="kv_injection",
    )(*operands, *pools)
    return tuple(new[:layers]), tuple(new[layers:])


def _project(features, weights):
    """[R, L, 2, K, H], rounded to the features' dtype as the reference does."""
    flat = lax.dot_general(
        features,
        weights.reshape(-1, weights.shape[-1]),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if features.dtype == jnp.float32 else None,
    )
    return flat.reshape(features.shape[0], *weights.shape[:-1])


def _parts(head_dim, half):
    """(begin, size) of a head's columns: the two halves that RoPE turns into each other, and the
    rest. Triton cannot shift columns."""
    parts = (0, half), (half, half), (2 * half, head_dim - 2 * half)
    return [part for part in parts if part[1]]


def _columns(part, axis):
    """A part's columns, and which of them exist: Triton's blocks are powers of two of at least
    16."""
    begin, size = part
    column = iota(max(16, pl.next_power_of_2(size)), axis)
    return begin + column, column < size


# Where a program's sums come from: (sources, its rows, (layer, K or V, head), parts) -> one a part.


def _projected_by(depth, float32):
    def sums_of(sources, index, place, parts):
        features, weights = sources
        real = index < features.shape[0]

        def step(at, sums):
            deep = at * depth + iota(depth, 1)
            x = triton.load(features.at[index, deep], mask=real, other=0)
            added = []
            for total, part in zip(sums, parts, strict=True):
                column, exists = _columns(part, 0)
                w = triton.load(weights.at[(*place, column, deep)], mask=exists, other=0)
                added.append(total + product(x, w, transposed=True, float32=float32))
            return tuple(added)

        shapes = [(index.shape[0], _columns(part, 1)[0].shape[1]) for part in parts]
        zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
        return lax.fori_loop(0, features.shape[1] // depth, step, zeros)

    return sums_of


def _read(sources, index, place, parts):
    (projected,) = sources
    sums = []
    for part in parts:
        column, exists = _columns(part, 1)
        mask = (index < projected.shape[0]) & exists
        value = triton.load(projected.at[(index, *place, column)], mask=mask, other=0)
        sums.append(value.astype(jnp.float32))
    return sums


def _kernel(
    k_norms, frequencies, page_table, start, count, k_scales, v_scales, *rest,
    sums_of, tokens, layers, rows, heads, attention_factor, eps,
):  # fmt: skip
    sources, pools = rest[: -4 * layers], rest[-2 * layers :]  # the results, which are the operands
    _, kv_heads, page_size, _ = pools[0].shape
    head_dim, half = k_norms.shape[1], frequencies.shape[0]
    groups = kv_heads // heads
    which, first_head = lax.div(pl.program_id(1), groups), lax.rem(pl.program_id(1), groups) * heads
    layer, is_value = lax.div(which, 2), lax.rem(which, 2)

    index = pl.program_id(0) * rows + iota(rows, 0)
    row, token = lax.div(index, tokens), lax.rem(index, tokens)
    real = row < start.shape[0]
    # Where the rows go is looked up first: three loads, each waiting for the one before, which the
    # products hide.
    first = triton.load(start.at[row], mask=real, other=0)
    live = real & (token < triton.load(count.at[row], mask=real, other=0))
    position = first + token
    live = live & (position < page_table.shape[1] * page_size)
    entry = lax.div(position, page_size)
    page = triton.load(page_table.at[row, entry], mask=live, other=0)
    offset = lax.rem(position, page_size)

    parts = _parts(head_dim, half)
    column, exists = _columns(parts[0], 1)
    turn = triton.load(frequencies.at[column], mask=exists, other=0)
    angle = position.astype(jnp.float32) * turn
    cos, sin = jnp.cos(angle) * attention_factor, jnp.sin(angle) * attention_factor

    def finish(head):
        # Written out once, and K or V taken from it: a copy for every pool would be most of the
        # program, and of its compilation.
        sums = sums_of(sources, index, (layer, is_value, head), parts)
        squares = sum(jnp.square(s).sum(-1, keepdims=True) for s in sums)
        scale = lax.rsqrt(squares / head_dim + eps)
        keys = []
        for s, part in zip(sums, parts, strict=True):
            column, exists = _columns(part, 1)
            norm = triton.load(k_norms.at[layer, column], mask=exists, other=0)
            keys.append(s * scale * norm.astype(jnp.float32))
        a, b, *passed = keys
        keys = [a * cos - b * sin, b * cos + a * sin, *passed]
        of_page = jnp.where(is_value == 1, v_scales[layer, head], k_scales[layer, head])
        made = [
            to_page_dtype(jnp.where(is_value == 1, value, key) / of_page, pools[0].dtype)
            for key, value in zip(keys, sums, strict=True)
        ]

        # A program's pool is one of many arrays, which no index can choose between.
        for number, pool in enumerate(pools):

            @pl.when(which == 2 * (number % layers) + number // layers)
            def _(pool=pool):
                for new, part in zip(made, parts, strict=True):
                    column, exists = _columns(part, 1)
                    triton.store(pool.at[page, head, offset, column], new, mask=live & exists)

    if heads == 1:
        finish(first_head)
    else:

        @pl.loop(0, heads)
        def _(number):
            finish(first_head + number)
