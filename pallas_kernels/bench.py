"""``python -m pallas_kernels.bench``: every op and shape, timed on this machine's device.

Prints the ceilings first (a large copy, a large product of random numbers), then a line an
implementation with its device time and how far it is from the shape's floor: the larger of its
bytes at the copy's rate and its operations at the product's. The last line is JSON.

A time is the median of many; each of them is a program of several calls, one fed by another, on
page tables and weights of their own, so that no call finds its data in a cache.
"""

import argparse
import dataclasses
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_attention import api as attention
from pallas_kernels.block_attention import gpu as attention_gpu
from pallas_kernels.block_attention import shapes as attention_shapes
from pallas_kernels.block_attention import tpu as attention_tpu
from pallas_kernels.kv_injection import api as injection
from pallas_kernels.kv_injection import gpu as injection_gpu
from pallas_kernels.kv_injection import shapes as injection_shapes
from pallas_kernels.kv_injection import tpu as injection_tpu
from pallas_kernels.platform import chip
from pallas_kernels.range_attention import api as ranges
from pallas_kernels.range_attention import gpu as range_gpu
from pallas_kernels.range_attention import shapes as range_shapes

CALLS = 16  # of an op in one program
PROGRAMS = 5  # in flight at once, so that the host's part is hidden

TILES: dict[tuple[str, str], list[Any]] = {
    ("block_attention", "gpu"): [
        attention_gpu.Tiles(rows, keys, programs, 4, warps, stages)
        for rows, keys, programs, warps, stages in itertools.product(
            (64, 128), (64, 128), (132, 264), (4, 8), (3, 5)
        )
    ],
    ("block_attention", "tpu"): [
        attention_tpu.Tiles(rows, context, keys)
        for rows, context, keys in itertools.product((128, 256, 512), (256, 512, 1024), (256,))
    ],
    ("kv_injection", "gpu"): [
        injection_gpu.Tiles(fused_rows, depth, warps, stages, rows, heads)
        for fused_rows, depth, warps, stages, rows, heads in (
            *itertools.product((256,), (64, 128), (4, 8), (4, 5, 6, 7), (16,), (1,)),
            *itertools.product((0,), (64,), (4,), (1,), (16, 32), (1, 2, 4, 8)),
        )
    ],
    ("range_attention", "gpu"): [
        range_gpu.Tiles(rows, keys, warps, stages)
        for rows, keys, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3))
    ],
    ("kv_injection", "tpu"): [injection_tpu.Tiles(rows) for rows in (128, 256, 512, 1024)],
}
"""What ``--tune`` tries."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Bytes a second, read and written, of a large copy; operations a second of a large product."""

    copy: float
    product: float

    @classmethod
    def measure(cls, *, small: bool) -> "Ceilings":
        numbers = jnp.arange(2**20 if small else 2**30)
        side = 256 if small else 8192
        a, b = jax.random.normal(jax.random.key(1), (2, side, side), jnp.bfloat16)
        # The faster of the runtime's own copy and a compiled loop's.
        copies = [jax.jit(jnp.copy), jax.jit(lambda x: x + 1)]
        product = jax.jit(lambda a, b: a @ b)
        copy_seconds = min(seconds(partial(copied, numbers)) for copied in copies)
        return cls(2 * numbers.nbytes / copy_seconds, 2 * side**3 / seconds(lambda: product(a, b)))

    def floor(self, shape) -> float:
        """Seconds."""
        return max(shape.bytes / self.copy, shape.flops / self.product)


def seconds(program: Callable[[], Any], repeats: int = 15) -> float:
    """Of one program: the median over ``repeats`` of ``PROGRAMS`` in flight together."""
    jax.block_until_ready(program())
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(PROGRAMS - 1):
            program()
        jax.block_until_ready(program())  # a device runs them in order
        taken.append((time.perf_counter() - started) / PROGRAMS)
    return statistics.median(taken)


def compiled(function, *operands) -> Callable[[], Any]:
    """A jitted function on these operands, compiled now."""
    return partial(function.lower(*operands).compile(), *operands)


def random_like(rng: np.random.Generator, abstract) -> jax.Array:
    key = jax.random.key(int(rng.integers(2**31)))
    return jax.random.normal(key, abstract.shape, jnp.float32).astype(abstract.dtype)


def shuffled_tables(
    rng: np.random.Generator, batch: int, width: int, pages: int
) -> list[jax.Array]:
    """``CALLS`` page tables over one pool, as far apart as its size allows."""
    ids = rng.permutation(np.arange(1, pages)).astype(np.int32)
    size = batch * width
    places = [np.arange(i * size, (i + 1) * size) % ids.size for i in range(CALLS)]
    return [jnp.asarray(ids[place].reshape(batch, width)) for place in places]


class AttentionCase:
    """Block attention on one shape."""

    op = "block_attention"

    def __init__(self, shape: attention_shapes.Shape, *, small: bool):
        rng, self.shape = np.random.default_rng(0), shape
        live = shape.batch * shape.pages
        # Tables apart in a pool of a gigabyte at most: several times any cache.
        bytes_each = 2 * shape.kv_heads * shape.page_size * shape.head_dim * 2
        pages = live + 1 if small else min(live * CALLS, max(live, 2**30 // bytes_each)) + 1
        q, k, v, pool, _, _, _ = shape.abstract(chip().platform, pages)
        self._q, self._k, self._v = (random_like(rng, x) for x in (q, k, v))
        self._pools = tuple(random_like(rng, pool) for _ in range(2))
        self._tables = shuffled_tables(rng, shape.batch, shape.pages, pages)
        self._lengths = jnp.full(shape.batch, shape.context, jnp.int32)
        self.implementations = ["reference", "portable"]

    def program(self, implementation: str, tiles=None) -> Callable[[], Any]:
        """Compiled."""
        shape = self.shape
        options = {"causal": shape.causal, "window": shape.window, "soft_cap": shape.soft_cap}
        options |= {"implementation": implementation, "tiles": tiles}

        attend = jax.jit(partial(attention.block_attention, **options))  # traced once

        @jax.jit
        def run(q, k, v, k_pages, v_pages, tables, lengths):
            for table in tables:
                q = attend(q, k, v, k_pages, v_pages, table, lengths)
            return q

        operands = (self._q, self._k, self._v, *self._pools, self._tables, self._lengths)
        return compiled(run, *operands)

    def rivals(self) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
        """Others' kernels where they do the same work, as programs to be made:
        jax.experimental.pallas.ops for one token, cuDNN (over dense K and V, which nobody has to
        gather) for a block that sees everything."""
        shape = self.shape
        if chip().platform != "gpu" or shape.page_dtype or shape.dtype != "bfloat16":
            return
        if shape.tokens == 1 and shape.window is None:
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

            pools = tuple(pool.swapaxes(0, 1) for pool in self._pools)

            @jax.jit
            def paged(q, k_pages, v_pages, tables, lengths):
                for table in tables:
                    q = paged_attention(q, k_pages, v_pages, table, lengths)
                return q

            operands = (self._q[:, 0], *pools, self._tables, self._lengths)
            yield "pallas.ops", lambda: compiled(paged, *operands)
        if not shape.causal and shape.window is None:
            rng = np.random.default_rng(1)
            rows = (shape.batch, shape.context + shape.tokens, shape.kv_heads, shape.head_dim)
            sets = [
                tuple(random_like(rng, jax.ShapeDtypeStruct(rows, shape.dtype)) for _ in range(2))
                for _ in range(2)
            ]

            @jax.jit
            def dense(q, sets):
                for call in range(CALLS):
                    k, v = sets[call % 2]
                    q = jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
                return q

            yield "cudnn (dense)", lambda: compiled(dense, self._q, sets)


class InjectionCase:
    """KV injection on one shape."""

    op = "kv_injection"

    def __init__(self, shape: injection_shapes.Shape, *, small: bool):
        rng, self.shape = np.random.default_rng(0), shape
        features, weights, norms, pools, _, _, start, _ = shape.abstract(chip().platform)
        # Of every call its own: a product that two calls share would be made once.
        self._features = tuple(random_like(rng, features) for _ in range(CALLS))
        self._norms = random_like(rng, norms)
        self._weights = tuple(random_like(rng, weights) for _ in range(1 if small else 4))
        self._pools = tuple(tuple(random_like(rng, p) for p in pools) for _ in range(2))
        pages = pools[0].shape[0]
        self._table = shuffled_tables(rng, shape.batch, shape.pages, pages)[0]
        room = shape.pages * shape.page_size - shape.tokens
        self._start = jnp.asarray(rng.integers(0, room + 1, start.shape), jnp.int32)
        self._count = jnp.full(start.shape, shape.tokens, jnp.int32)
        self.implementations = ["reference"]

    def program(self, implementation: str, tiles=None) -> Callable[[], Any]:
        shape = self.shape

        @jax.jit  # traced once
        def inject(features, weights, norms, k_pages, v_pages, table, start, count):
            return injection.kv_injection(
                features, weights, norms, k_pages, v_pages, table, start, count,
                inverse_frequencies=jnp.ones(shape.frequencies), attention_factor=1.0,
                eps=1e-6, implementation=implementation, tiles=tiles,
            )  # fmt: skip

        @partial(jax.jit, donate_argnums=0)
        def run(pools, features, weights, norms, table, start, count):
            for call in range(CALLS):
                own = weights[call % len(weights)]
                pools = inject(features[call], own, norms, *pools, table, start, count)
            return pools

        operands = (
            self._features, self._weights, self._norms, self._table, self._start, self._count,
        )  # fmt: skip
        program = run.lower(self._pools, *operands).compile()

        def once():
            self._pools = program(self._pools, *operands)
            return self._pools

        return once

    def rivals(self) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
        """None: nobody has this op. The reference is XLA's own form of it, unfused."""
        yield from ()


class RangeCase:
    """Range attention on one shape: whole rows of one document."""

    op = "range_attention"

    def __init__(self, shape: range_shapes.Shape, *, small: bool):
        rng, self.shape = np.random.default_rng(0), shape
        self._operands = tuple(random_like(rng, x) for x in shape.abstract())
        self.implementations = ["reference"]

    def program(self, implementation: str, tiles=None) -> Callable[[], Any]:
        stop = jnp.arange(1, self.shape.tokens + 1, dtype=jnp.int32)
        stop = jnp.broadcast_to(stop[None, :], (self.shape.batch, self.shape.tokens))

        @jax.jit
        def attend(q, k, v):
            return ranges.range_attention(
                q, k, v, jnp.zeros_like(stop), stop, implementation=implementation, tiles=tiles
            )[0]

        return self._chained(attend)

    def rivals(self) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
        """cuDNN, which knows no documents."""
        if chip().platform == "gpu":
            attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            yield "cudnn", lambda: self._chained(attend)

    def _chained(self, attend) -> Callable[[], Any]:
        @jax.jit
        def run(q, k, v):
            for _ in range(CALLS):
                q = attend(q, k, v)
            return q

        return compiled(run, *self._operands)


Case = AttentionCase | InjectionCase | RangeCase


def cases(pattern: str, *, small: bool) -> Iterator[tuple[str, Callable[[], Case]]]:
    """(name, what makes the case); arrays are made one case at a time."""
    for name, shape in attention_shapes.SHAPES.items():
        if re.search(pattern, full := f"block_attention/{name}"):
            yield full, partial(AttentionCase, shape, small=small)
    for name, shape in injection_shapes.SHAPES.items():
        if re.search(pattern, full := f"kv_injection/{name}"):
            yield full, partial(InjectionCase, shape, small=small)
    for name, shape in range_shapes.SHAPES.items():
        if re.search(pattern, full := f"range_attention/{name}"):
            yield full, partial(RangeCase, shape, small=small)


def time_case(name: str, case: Case, ceilings: Ceilings, *, tune: bool) -> dict[str, Any]:
    """Every implementation of one case, and with ``tune`` its kernel's tiles too."""
    floor, platform = ceilings.floor(case.shape), chip().platform
    result: dict[str, Any] = {"floor_us": floor * 1e6, "us": {}}
    programs: list[tuple[str, Callable[[], Callable[[], Any]]]] = [
        (each, partial(case.program, each)) for each in case.implementations
    ]
    kernel = (case.op, platform) in TILES
    if kernel:
        programs.append((platform, partial(case.program, platform)))
    programs += case.rivals()
    if tune and kernel:
        programs += [
            (str(tiles), partial(case.program, platform, tiles))
            for tiles in TILES[case.op, platform]
        ]
    # One after the other: XLA chooses its products by timing them while it compiles.
    for label, make in programs:
        try:
            taken = seconds(make()) / CALLS
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            print(f"{name:40} {label:14} refused: {str(error).splitlines()[0][:120]}", flush=True)
            result["us"][label] = None
            result["kernel_refused"] = result.get("kernel_refused", False) or label == platform
            continue
        result["us"][label] = taken * 1e6
        rate = case.shape.bytes / taken / 1e12
        print(
            f"{name:40} {label:14} {taken * 1e6:9.1f} us  {taken / floor:6.2f} x floor  "
            f"{rate:6.2f} TB/s",
            flush=True,
        )
    return result


def main(argv: list[str] | None = None) -> int:
    """0: done; 1: a kernel refused a shape that it is built for; 2: the user's to mend."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--tune", action="store_true", help="try the kernels' tiles too")
    parser.add_argument("--list", action="store_true", help="print the cases' names and end")
    args = parser.parse_args(argv)
    try:
        re.compile(args.only)
    except re.error as error:
        parser.error(f"--only {args.only!r} is no regular expression: {error}")
    small = chip().platform == "cpu"
    chosen = list(cases(args.only, small=small))
    if not chosen:
        parser.error(f"--only {args.only!r} matches no case; --list names them")
    if args.list:
        print(*(name for name, _ in chosen), sep="\n")
        return 0
    ceilings = Ceilings.measure(small=small)
    print(f"{chip().kind}, jax {jax.__version__}")
    print(f"copy {ceilings.copy / 1e12:.3f} TB/s, product {ceilings.product / 1e12:.2f} TFLOP/s")
    report: dict[str, Any] = {
        "chip": chip().kind,
        "jax": jax.__version__,
        "copy_tb_per_s": ceilings.copy / 1e12,
        "product_tflop_per_s": ceilings.product / 1e12,
        "cases": {},
    }
    for name, make in chosen:
        report["cases"][name] = time_case(name, make(), ceilings, tune=args.tune)
    print(json.dumps(report))
    return int(any(case.get("kernel_refused") for case in report["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
