"""``python -m train bench RECIPE``: how fast a training step is here, beside what could be.

    python -m train bench qwen3-4b --rows 8 --set loop.accumulation=2

Random weights of the recipe's shape; the last line is all numbers as JSON.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from dflash_jax.cli.info import devices, versions
from dflash_jax.compilation_cache import default_compilation_cache_dir, keep_compilations
from dflash_jax.config import TargetConfig
from dflash_jax.flags import flag
from dflash_jax.generate import find_pair
from dflash_jax.hf_config import read_target_config
from train.bench import MATMUL, MATMUL_ON_CPU, Bench, bench_step, matmul_flops_per_second
from train.chips import chip_of
from train.cli.step_args import StepArgs
from train.loop import check_rows_split
from train.mesh import training_sharding
from train.recipes import Recipe
from train.target import TargetRecipe

TERA = 1e12


@dataclasses.dataclass(frozen=True)
class BenchArgs(StepArgs):
    """Raises ValueError naming an impossible flag."""

    target: str | None = flag(
        "HF folder, .gguf file or hub name whose shape takes the place of the recipe's", "--target"
    )
    rows: int | None = flag("packed rows a step, in place of the recipe's", "--rows", type=int)
    steps: int = flag("that are timed, after a first one", "--steps", default=10, type=int)
    matmul: int | None = flag(
        "side of the square matrices whose product is the measured ceiling "
        f"(default: {MATMUL}; {MATMUL_ON_CPU} on a CPU)",
        "--matmul",
        type=int,
    )
    profile: Path | None = flag(
        "folder for a trace of one step, for TensorBoard or Perfetto", "--profile", type=Path
    )
    compilation_cache_dir: Path = flag(
        "where compiled programs are kept between runs", "--compilation-cache-dir",
        default=default_compilation_cache_dir(), type=Path,
    )  # fmt: skip

    def __post_init__(self):
        for name in ("rows", "steps", "matmul"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")


def run(args: BenchArgs) -> int:
    keep_compilations(args.compilation_cache_dir)
    recipe = args.changed_recipe()
    if args.rows is not None:
        loop = dataclasses.replace(recipe.loop, batch_rows=args.rows)
        recipe = dataclasses.replace(recipe, loop=loop)
    shape = _shape(recipe, args.target)
    sharding = training_sharding(*args.mesh)
    check_rows_split(recipe.loop, sharding)
    loop, objective = recipe.loop, recipe.loop.objective
    shapes = {
        "rows": loop.batch_rows,
        "row_length": recipe.row_length,
        "anchors": objective.anchors,
        "accumulation": loop.accumulation,
        "remat": objective.remat,
        "dtype": recipe.dtype,
    }
    print(f"device      {', '.join(devices())}")
    print(f"versions    {', '.join(f'{k} {v}' for k, v in versions().items())}")
    print(f"mesh        {' x '.join(f'{n} {axis}' for axis, n in sharding.mesh.shape.items())}")
    print(f"step        {recipe.name}, random weights: ", end="")
    print(", ".join(f"{k} {v}" for k, v in shapes.items()))

    chip = chip_of(jax.devices()[0].device_kind)
    side = args.matmul or (MATMUL_ON_CPU if jax.default_backend() == "cpu" else MATMUL)
    measured = matmul_flops_per_second(side)
    sheet = f"{chip.peak_flops / TERA:.0f} by the data sheet" if chip else "no data sheet known"
    print(
        f"ceiling     {measured / TERA:.2f} TFLOP/s a device, measured on a bf16 product of side "
        f"{side}; {sheet}",
        flush=True,
    )

    bench = bench_step(recipe, shape, sharding, steps=args.steps, profile=args.profile)
    count = sharding.mesh.size
    rate = bench.step.flops / bench.step.seconds / count
    used = {"measured": rate / measured} | ({"data sheet": rate / chip.peak_flops} if chip else {})
    peak = "not told" if bench.peak_bytes is None else f"{bench.peak_bytes / 1e9:.2f} GB"
    print(f"speed       {1e3 * bench.step.seconds:.2f} ms a step, the median of {args.steps}")
    print(f"tokens      {bench.tokens / bench.step.seconds:.0f} packed tokens/s, ", end="")
    print(f"{bench.draft_tokens / bench.step.seconds:.0f} drafted tokens/s")
    print(f"compute     {rate / TERA:.2f} model TFLOP/s a device; MFU ", end="")
    print(", ".join(f"{share:.1%} of the {name} peak" for name, share in used.items()))
    print(f"memory      peak {peak} a device; first step {bench.compile_seconds:.0f} s")
    print("\npart                   ms  of step  TFLOP/s a device")
    breakdown = _breakdown(bench, count)
    for row in breakdown:
        print(
            f"{row['part']:17} {row['ms']:9.2f} {row['share']:8.1%} {row['tflops_per_second']:9.2f}"
        )
    report = {
        "devices": devices(),
        "versions": versions(),
        "recipe": recipe.name,
        "set": list(args.override),
        "mesh": dict(sharding.mesh.shape),
        **shapes,
        "matmul_flops_per_second": measured,
        "peak_flops_per_second": chip and chip.peak_flops,
        "step_ms": 1e3 * bench.step.seconds,
        "tokens_per_second": bench.tokens / bench.step.seconds,
        "draft_tokens_per_second": bench.draft_tokens / bench.step.seconds,
        "model_flops": {**bench.flops._asdict(), "total": bench.flops.total},
        "flops_per_second_per_device": rate,
        "mfu": used,
        "peak_bytes": bench.peak_bytes,
        "compile_seconds": bench.compile_seconds,
        "parts": breakdown,
    }
    print(json.dumps(report))
    return 0


def _breakdown(bench: Bench, devices: int) -> list[dict[str, Any]]:
    """What was timed, and between the parts what must be left for the others."""
    target, forward = bench.parts["target forward"], bench.parts["all forward"]
    step = bench.step
    parts = {
        "target forward": (target.seconds, target.flops),
        "draft, loss": (forward.seconds - target.seconds, forward.flops - target.flops),
        "backward, update": (step.seconds - forward.seconds, step.flops - forward.flops),
        "step": (step.seconds, step.flops),
    }
    return [
        {
            "part": name,
            "ms": 1e3 * seconds,
            "share": seconds / step.seconds,
            "tflops_per_second": flops / seconds / devices / TERA,
        }
        for name, (seconds, flops) in parts.items()
    ]


def _shape(recipe: Recipe, target: str | None) -> TargetConfig:
    """The target's shape; no weight is read. Raises ValueError where ``target`` is not found."""
    if target is None and recipe.shape is not None:
        return recipe.shape
    if target is None and isinstance(recipe.target, TargetRecipe):
        return recipe.target.config
    name = target if target is not None else recipe.target
    assert name is None or isinstance(name, str)
    path, _ = find_pair(name, None, speculation=False)
    return read_target_config(path)
