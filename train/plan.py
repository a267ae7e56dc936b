"""What a recipe's training step will need on TPUs, found by compiling it without having any."""

import dataclasses
import importlib.util
import os
import re
import time
from collections import Counter
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.config import TargetConfig
from dflash_jax.decoder import Pair
from dflash_jax.sharding import Sharding
from train.chips import CHIPS, Chip, chip_of
from train.flops import StepFlops, step_flops
from train.recipes import Recipe
from train.rows import PackedRows
from train.stacked import FrozenTarget
from train.step import abstract_state, make_step, rows_placement
from train.target import TargetRecipe

# libtpu asks a TPU machine's metadata server who it is, and holds a lock on the chips; a compiler
# needs neither. It reads these when it is loaded, and a user's own values stay.
LIBTPU_SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
COLLECTIVES = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
# The compiler's two ways of giving up: at the program's temporaries, and at all of it.
OUT_OF_MEMORY = re.compile(
    r"temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM|Used ([\d.]+)([KMGT]?) of .*hbm"
)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a chip. ``temporaries``: what the program asks for in one piece beside its
    arguments and its ``results``, those apart that take a donated argument's place. ``peak``: the
    most of all of it that is alive at a time; the gaps between what is alive are not in it."""

    arguments: int
    results: int
    temporaries: int
    peak: int

    @property
    def needed(self) -> int:
        return self.arguments + self.results + self.temporaries


@dataclasses.dataclass(frozen=True)
class Plan:
    """``needed``: bytes of a chip; where the compiler gave up ``memory`` is None, and this is its
    own estimate. ``flops``: of all chips. ``collectives``: how often each is in the program; those
    in a loop over layers run once a layer."""

    chip: Chip
    mesh: dict[str, int]
    memory: Memory | None
    needed: int
    flops: StepFlops
    collectives: dict[str, int]
    compile_seconds: float

    @property
    def fits(self) -> bool:
        return self.memory is not None and self.needed <= self.chip.hbm_bytes


def tpu_devices(topology: str) -> list[Any]:
    """Devices of a TPU ``topology`` such as v6e:4x4, to compile for; the process computes on its
    CPU from here on. Call it before JAX has any devices.

    Raises ValueError where libtpu is not installed, or does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("plans need the TPU compiler libtpu: pip install 'dflash_jax[tpu]'")
    for name, value in LIBTPU_SETTINGS.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"no TPU topology {topology!r} (v5e:2x4 is one): {error}") from error
    if chip_of(described.devices[0].device_kind) is None:
        known = ", ".join(sorted({chip.name for chip in CHIPS.values()}))
        raise ValueError(
            f"the memory of {described.devices[0].device_kind} is not known here; {known} are"
        )
    return described.devices


def stated_shape(recipe: Recipe) -> TargetConfig:
    """The target's shape as ``recipe`` states it. Raises ValueError where it does not."""
    if recipe.shape is not None:
        return recipe.shape
    if isinstance(recipe.target, TargetRecipe):
        return recipe.target.config
    raise ValueError(f"the recipe {recipe.name} does not state its target's shape")


def plan_step(recipe: Recipe, sharding: Sharding) -> Plan:
    """Compile the recipe's training step for the devices of ``sharding``, its target's features
    computed in the step."""
    chip = chip_of(sharding.mesh.devices.flat[0].device_kind)
    assert chip is not None
    shape, loop = stated_shape(recipe), recipe.loop
    draft = recipe.draft_config(shape)
    pair = Pair.of(shape, draft, sharding, jnp.dtype(recipe.dtype))
    step = make_step(pair, loop.objective, loop.optimizer, accumulation=loop.accumulation)
    rate = jax.ShapeDtypeStruct(
        (), jnp.float32, sharding=NamedSharding(sharding.mesh, PartitionSpec())
    )
    started = time.perf_counter()
    lowered = cast(Any, step).lower(
        abstract_state(pair, loop.optimizer),
        FrozenTarget.of(pair).placed(),
        abstract_rows(pair, loop.batch_rows, recipe.row_length),
        None,
        rate,
    )
    memory, collectives = None, {}
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = OUT_OF_MEMORY.search(str(error))
        if found is None:
            raise
        amount, unit = (part for part in found.groups() if part is not None)
        needed = int(float(amount) * UNITS[unit])
    else:
        analysis = compiled.memory_analysis()
        memory = Memory(
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            analysis.temp_size_in_bytes,
            analysis.peak_memory_in_bytes,
        )
        needed = memory.needed
        collectives = dict(Counter(COLLECTIVES.findall(compiled.as_text())).most_common())
    return Plan(
        chip,
        dict(sharding.mesh.shape),
        memory,
        needed,
        step_flops(
            shape,
            draft,
            rows=loop.batch_rows,
            row_length=recipe.row_length,
            anchors=loop.objective.anchors,
            kl=bool(loop.objective.loss.kl),
        ),
        collectives,
        time.perf_counter() - started,
    )


def abstract_rows(pair: Pair, rows: int, row_length: int) -> PackedRows:
    """Shapes and placements of a batch."""

    def leaf(dtype) -> Any:
        return jax.ShapeDtypeStruct((rows, row_length), dtype, sharding=rows_placement(pair))

    return PackedRows(leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.bool_))
