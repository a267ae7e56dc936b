"""How fast a training step runs on the devices at hand, beside what they could do.

Weights and tokens are random: speed does not depend on them, and nothing needs to be downloaded.
Rows are full, one document each, so that attention and anchors have all that they can have.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.config import TargetConfig
from dflash_jax.decoder import Pair
from dflash_jax.functional import Params
from dflash_jax.sharding import Sharding
from train.attention import forward_on
from train.flops import StepFlops, forward_flops, step_flops
from train.objective import target_output
from train.recipes import Recipe
from train.rows import PackedRows
from train.stacked import FrozenTarget
from train.step import init_state, make_step, make_validation, rows_placement

MATMUL = 8192
MATMUL_ON_CPU = 512
"""Sides of the square product that the matmul rate is measured by: 21 products of side 8192 take
two CPU cores minutes."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """Median seconds of a part, and its model FLOPs."""

    seconds: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Bench:
    """Of one step over ``rows`` rows. ``parts``: each timed by itself, over a whole batch.
    ``peak_bytes``: of the first device after the steps; None where it does not say.
    ``compile_seconds``: the first step's, its compilation included."""

    step: Timed
    parts: dict[str, Timed]
    flops: StepFlops
    rows: int
    tokens: int
    draft_tokens: int
    peak_bytes: int | None
    compile_seconds: float


def bench_step(
    recipe: Recipe,
    shape: TargetConfig,
    sharding: Sharding,
    *,
    steps: int,
    profile: Path | None = None,
) -> Bench:
    """Time ``steps`` warm steps of ``recipe`` on a target of ``shape``, then their parts.
    ``profile``: a folder that gets a trace of one more step."""
    loop, draft = recipe.loop, recipe.draft_config(shape)
    pair = Pair.of(shape, draft, sharding, jnp.dtype(recipe.dtype))
    frozen = FrozenTarget.of(pair)
    assert pair.draft is not None
    target = random_params(frozen.placed(), seed=0)
    start = random_params(pair.draft.placed(sharding), seed=1)
    state = init_state(pair, start, loop.optimizer)
    del start
    rows = full_rows(pair, loop.batch_rows, recipe.row_length)
    step = make_step(pair, loop.objective, loop.optimizer, accumulation=loop.accumulation)

    def advance() -> None:
        nonlocal state
        state, report = step(state, target, rows, None, jnp.float32(1e-4))
        jax.block_until_ready((state, report))

    started = time.perf_counter()
    advance()
    compile_seconds = time.perf_counter() - started
    step_seconds = median_seconds(advance, steps)
    stats = jax.local_devices()[0].memory_stats() or {}
    if profile is not None:
        with jax.profiler.trace(profile):
            advance()

    part = full_rows(pair, loop.batch_rows // loop.accumulation, recipe.row_length)
    objective, attention = loop.objective, forward_on(sharding.mesh)

    @jax.jit
    def features(target: Params, rows: PackedRows):
        bound = frozen.bind(target)
        return target_output(bound, rows, pair.taps, objective.tiles, attention).features

    validate = make_validation(pair, objective)
    counted = {
        "rows": loop.batch_rows,
        "row_length": recipe.row_length,
        "anchors": objective.anchors,
        "kl": bool(objective.loss.kl),
    }
    forward, whole = forward_flops(shape, draft, **counted), step_flops(shape, draft, **counted)
    calls: dict[str, tuple[Callable[[], Any], float]] = {
        "target forward": (lambda: features(target, part), forward.target),
        "all forward": (lambda: validate(state.masters, target, part, None), forward.total),
    }
    parts = {}
    for name, (call, flops) in calls.items():
        jax.block_until_ready(call())
        seconds = median_seconds(lambda call=call: jax.block_until_ready(call()), steps)
        parts[name] = Timed(seconds * loop.accumulation, flops)
    return Bench(
        Timed(step_seconds, whole.total),
        parts,
        whole,
        loop.batch_rows,
        loop.batch_rows * recipe.row_length,
        loop.batch_rows * objective.anchors * (draft.block_size - 1),
        stats.get("peak_bytes_in_use"),
        compile_seconds,
    )


def matmul_flops_per_second(size: int, repeats: int = 20) -> float:
    """FLOPs a second of one device on a product of two bfloat16 matrices: median of many."""
    # Random numbers: on constants a GPU draws less power and runs an eighth faster.
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(a, a))
    seconds = median_seconds(lambda: jax.block_until_ready(multiply(a, a)), repeats)
    return 2 * size**3 / seconds


def random_params(placed: Mapping[str, jax.ShapeDtypeStruct], seed: int) -> dict[str, jax.Array]:
    """Normal weights, norms of one: made leaf by leaf on the devices that hold them."""
    # The generator of the hardware: counters of the default one take several times a leaf.
    key = jax.random.key(seed, impl="unsafe_rbg")

    @cache  # a compilation a shape, not a leaf
    def maker(shape, dtype, sharding, is_norm: bool):
        def make(key):
            if is_norm:
                return jnp.ones(shape, dtype)
            return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)

        return jax.jit(make, out_shardings=sharding)

    params = {}
    for number, (name, leaf) in enumerate(placed.items()):
        make = maker(leaf.shape, leaf.dtype, leaf.sharding, name.endswith("norm.weight"))
        params[name] = make(jax.random.fold_in(key, number))
    return params


def full_rows(pair: Pair, rows: int, row_length: int) -> PackedRows:
    """Rows of random tokens, one document each, all of it supervised."""
    placement = rows_placement(pair)

    def make(key) -> PackedRows:
        shape = (rows, row_length)
        tokens = jax.random.randint(key, shape, 0, pair.target_config.vocab_size, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(row_length, dtype=jnp.int32)[None, :], shape)
        return PackedRows(tokens, jnp.ones(shape, jnp.int32), positions, jnp.ones(shape, jnp.bool_))

    return jax.jit(make, out_shardings=placement)(jax.random.key(0))


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Wall clock of a ``call`` that waits for its own results."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
