"""``python -m train plan RECIPE``: does a training step fit, compiled for TPUs that are not there.

    python -m train plan qwen3-8b --topology v6e:4x4 --fsdp-size 16

A chip's memory, FLOPs and collectives, and as the last line all of it as JSON.
"""

import dataclasses
import json

from dflash_jax.flags import flag
from train.cli.step_args import StepArgs
from train.loop import check_rows_split
from train.mesh import training_sharding
from train.plan import Plan, plan_step, stated_shape, tpu_devices

GB = 1e9


@dataclasses.dataclass(frozen=True)
class PlanArgs(StepArgs):
    """Raises ValueError naming an impossible flag."""

    topology: str = flag(
        "TPU chips to compile for, such as v5e:2x4, v5p:4x4x4 or v6e:4x4", "--topology",
        required=True,
    )  # fmt: skip


def run(args: PlanArgs) -> int:
    """0: it fits; 1: it does not."""
    recipe = args.changed_recipe()
    stated_shape(recipe)  # before the compiler is looked for
    devices = tpu_devices(args.topology)
    sharding = training_sharding(*args.mesh, devices=devices)
    check_rows_split(recipe.loop, sharding)
    plan = plan_step(recipe, sharding)
    chips = sharding.mesh.size
    mesh = " x ".join(f"{size} {axis}" for axis, size in plan.mesh.items())
    print(
        f"step         {recipe.name}: {recipe.loop.batch_rows} rows of {recipe.row_length} tokens"
    )
    print(f"mesh         {mesh} of {args.topology}")
    print(f"memory       {_memory(plan)}, of {plan.chip.hbm_bytes / GB:.0f} GB a chip")
    print(f"model FLOPs  {plan.flops.total / chips / 1e12:.2f} T a step and chip")
    counts = ", ".join(f"{name} {count}" for name, count in plan.collectives.items()) or "none"
    print(f"collectives  {counts} in the program")
    print(f"compilation  {plan.compile_seconds:.0f} s")
    print(f"it {'fits' if plan.fits else 'does not fit'}")
    report = {
        "recipe": recipe.name,
        "set": list(args.override),
        "topology": args.topology,
        "mesh": plan.mesh,
        "rows": recipe.loop.batch_rows,
        "row_length": recipe.row_length,
        "memory_bytes": plan.memory and dataclasses.asdict(plan.memory),
        "needed_bytes": plan.needed,
        "hbm_bytes": plan.chip.hbm_bytes,
        "model_flops_per_chip": plan.flops.total / chips,
        "collectives": plan.collectives,
        "compile_seconds": plan.compile_seconds,
        "fits": plan.fits,
    }
    print(json.dumps(report))
    return 0 if plan.fits else 1


def _memory(plan: Plan) -> str:
    if plan.memory is None:
        return f"the compiler gave up at {plan.needed / GB:.2f} GB"
    sizes = dataclasses.asdict(plan.memory)
    parts = ", ".join(f"{name} {size / GB:.2f} GB" for name, size in sizes.items())
    return f"{plan.needed / GB:.2f} GB needed ({parts})"
