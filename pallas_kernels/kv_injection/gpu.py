"""KV injection for GPUs (Pallas, Triton lowering): a program makes one head's K, or V, of a layer
for a tile of rows, from the projection to the stores into pages."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.narrow import to_page_dtype
from pallas_kernels.paging import check_triton_offsets
from pallas_kernels.product import product
from pallas_kernels.tiles import check_sizes


@dataclasses.dataclass(frozen=True)
class Tiles:
    """``rows`` of features a program takes, at most, and ``depth``: how much of D a step."""

    rows: int = 64
    depth: int = 64
    warps: int = 4
    stages: int = 4

    def __post_init__(self):
        check_sizes(self, powers=("rows", "depth", "warps"), multiples_of_16=("rows", "depth"))


def kv_injection(
    features, weights, k_norms, k_pages, v_pages, page_table, start, count, k_scales, v_scales,
    *, inverse_frequencies, attention_factor, eps, tiles: Tiles | None = None, interpret=False,
):  # fmt: skip
    """The contract of ``kv_injection.api``. Raises ValueError where ``depth`` does not divide D or
    Triton's offsets do not reach all of a pool."""
    check_triton_offsets("kv_injection", k_pages[0])
    tiles = tiles or Tiles()
    batch, tokens, dim = features.shape
    layers, kv_heads = len(k_pages), k_pages[0].shape[1]
    depth = min(tiles.depth, dim)
    if dim % depth:
        raise ValueError(
            f"kv_injection: implementation 'gpu' takes {depth} of D at a time, which must divide "
            f"{dim}"
        )
    rows = min(tiles.rows, max(16, pl.next_power_of_2(batch * tokens)))
    body = functools.partial(
        _kernel,
        layers=layers,
        rows=rows,
        depth=depth,
        attention_factor=attention_factor,
        eps=eps,
    )
    pools = (*k_pages, *v_pages)
    operands = (
        features, weights, k_norms, inverse_frequencies, page_table, start, count, k_scales,
        v_scales,
    )  # fmt: skip
    new = pl.pallas_call(
        body,
        out_shape=pools,
        grid=(pl.cdiv(batch * tokens, rows), layers * 2 * kv_heads),
        input_output_aliases={len(operands) + i: i for i in range(len(pools))},
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="kv_injection",
    )(*operands, *pools)
    return tuple(new[:layers]), tuple(new[layers:])


def _kernel(
    features, weights, k_norms, frequencies, page_table, start, count, k_scales, v_scales,
    *pools, layers, rows, depth, attention_factor, eps,
):  # fmt: skip
    pools = pools[2 * layers :]  # the results, which are the operands
    tokens, dim = features.shape[1:]
    _, kv_heads, page_size, _ = pools[0].shape
    head_dim, half = k_norms.shape[1], frequencies.shape[0]
    which, head = lax.div(pl.program_id(1), kv_heads), lax.rem(pl.program_id(1), kv_heads)
    layer, is_value = lax.div(which, 2), lax.rem(which, 2)

    def iota(size, axis):
        shape = (size, 1) if axis == 0 else (1, size)
        return lax.broadcasted_iota(jnp.int32, shape, axis)

    index = pl.program_id(0) * rows + iota(rows, 0)
    row, token = lax.div(index, tokens), lax.rem(index, tokens)
    real = row < features.shape[0]
    # Where the rows go is looked up first: three loads, each waiting for the one before, which the
    # products hide.
    first = triton.load(start.at[row], mask=real, other=0)
    live = real & (token < triton.load(count.at[row], mask=real, other=0))
    position = first + token
    live = live & (position < page_table.shape[1] * page_size)
    entry = lax.div(position, page_size)
    page = triton.load(page_table.at[row, entry], mask=live, other=0)
    offset = lax.rem(position, page_size)

    # A head's columns in three parts: the two that RoPE turns into each other, and the rest.
    # Triton cannot shift columns, and its blocks are powers of two of at least 16.
    parts = []
    for begin, size in ((0, half), (half, half), (2 * half, head_dim - 2 * half)):
        if size:
            column = iota(max(16, pl.next_power_of_2(size)), 1)
            parts.append((begin + column, column < size))

    def step(at, sums):
        deep = at * depth
        place = row, token, deep + iota(depth, 1)
        x = triton.load(features.at[place], mask=real, other=0)
        added = []
        for total, (column, exists) in zip(sums, parts, strict=True):
            place = layer, is_value, deep + iota(depth, 0), head * head_dim + column
            w = triton.load(weights.at[place], mask=exists, other=0)
            added.append(total + product(x, w))
        return tuple(added)

    zeros = tuple(jnp.zeros((rows, column.shape[1]), jnp.float32) for column, _ in parts)
    sums = lax.fori_loop(0, dim // depth, step, zeros)

    # Of both kinds the epilogue is written out once, and each program takes the results of its own:
    # a copy for every pool would be most of the program, and of its compilation.
    squares = sum(jnp.square(s).sum(-1, keepdims=True) for s in sums)
    scale = lax.rsqrt(squares / head_dim + eps)
    keys = []
    for s, (column, exists) in zip(sums, parts, strict=True):
        norm = triton.load(k_norms.at[layer, column], mask=exists, other=0)
        keys.append(s * scale * norm.astype(jnp.float32))
    column, exists = parts[0]
    turn = triton.load(frequencies.at[column], mask=exists, other=0)
    angle = position.astype(jnp.float32) * turn
    cos, sin = jnp.cos(angle) * attention_factor, jnp.sin(angle) * attention_factor
    a, b, *rest = keys
    keys = [a * cos - b * sin, b * cos + a * sin, *rest]
    of_page = jnp.where(is_value == 1, v_scales[layer, head], k_scales[layer, head])
    rows_made = [
        to_page_dtype(jnp.where(is_value == 1, value, key) / of_page, pools[0].dtype)
        for key, value in zip(keys, sums, strict=True)
    ]

    # A program's pool is one of many arrays, which no index can choose between.
    for number, pool in enumerate(pools):

        @pl.when(which == 2 * (number % layers) + number // layers)
        def _(pool=pool):
            for made, (column, exists) in zip(rows_made, parts, strict=True):
                triton.store(pool.at[page, head, offset, column], made, mask=live & exists)
