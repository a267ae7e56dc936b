"""One training step: frozen target, draft, loss, gradient and AdamW, in one jitted program."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from dflash_jax.decoder import Pair
from dflash_jax.functional import Params
from dflash_jax.models import TargetOutput
from train.attention import forward_on
from train.losses import Metrics
from train.objective import ObjectiveConfig, objective, target_output
from train.rows import PackedRows
from train.stacked import FrozenTarget, StackedDraft


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon on float32 masters, the gradient clipped to a global norm of ``clip``.

    ``kind``: Muon orthogonalises the momentum of every matrix, scaled to an RMS of 0.2 as AdamW's
    steps have (arXiv 2502.16982); the norms stay with AdamW."""

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 6e-4
    weight_decay: float = 0.0
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.95
    warmup: float = 0.04
    """Share of the run over which the rate rises; a cosine to zero follows."""

    def __post_init__(self):
        accepted = {
            "kind": (self.kind in ("adamw", "muon"), "adamw or muon"),
            "learning_rate": (0 < self.learning_rate < math.inf, "more than 0"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "at least 0"),
            "clip": (self.clip > 0, "more than 0"),
            "b1": (0 <= self.b1 < 1, "in [0, 1)"),
            "b2": (0 <= self.b2 < 1, "in [0, 1)"),
            "warmup": (0 <= self.warmup <= 1, "in [0, 1]"),
        }
        for name, (fits, what) in accepted.items():
            if not fits:
                raise ValueError(f"optimizer.{name} must be {what}, got {getattr(self, name)!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """``step``: how many are done. ``masters``: the draft in float32. ``moments``: optax's own."""

    step: Int[Array, ""]
    masters: Params
    moments: Any


class StepReport(NamedTuple):
    """``metrics``: sums over the whole batch. ``gradient_norm``: of the mean loss, unclipped."""

    metrics: Metrics
    gradient_norm: Float[Array, ""]


Step = Callable[..., tuple[TrainState, StepReport]]
"""(state, stacked target params, rows, features or None, rate) -> (state, report). Donates the
state."""


def init_state(pair: Pair, draft: Mapping[str, jax.Array], config: OptimizerConfig) -> TrainState:
    """The state before the first step. ``draft`` is copied: steps donate their masters, and the
    caller's (or the target's) arrays must live on."""
    abstract = abstract_state(pair, config)
    masters = {
        name: jax.device_put(jnp.array(draft[name], jnp.float32), leaf.sharding)
        for name, leaf in abstract.masters.items()
    }
    placements = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def start(masters):
        return TrainState(jnp.int32(0), masters, _optimizer(config).init(masters))

    return jax.jit(start, out_shardings=placements)(masters)


def abstract_state(pair: Pair, config: OptimizerConfig) -> TrainState:
    """Shapes, dtypes and placements of the state: for restores and ahead-of-time compilation."""
    assert pair.draft is not None
    masters = {
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
        for name, leaf in pair.draft.placed(pair.sharding).items()
    }
    everywhere = NamedSharding(pair.sharding.mesh, PartitionSpec())
    moments = jax.eval_shape(_optimizer(config).init, masters)
    # optax keeps moments in dicts like the parameters' own, so a leaf's name says its placement.
    placed = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=masters[path[-1].key].sharding
            if isinstance(path[-1], jax.tree_util.DictKey)
            else everywhere,
        ),
        moments,
    )
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(cast(Any, step), cast(Any, masters), placed)


def make_step(
    pair: Pair,
    objective_config: ObjectiveConfig,
    optimizer_config: OptimizerConfig,
    *,
    accumulation: int = 1,
    seed: int = 0,
) -> Step:
    """A jitted step. Rows are split over the mesh; ``accumulation`` parts of a batch go through
    one after the other. Loss, gradient and anchors are those of the whole batch, whatever the
    mesh and the parts."""
    sharding, optimizer = pair.sharding, _optimizer(optimizer_config)

    def step(state: TrainState, target_params, rows: PackedRows, features, rate):
        keys = row_keys(seed, state.step, rows.tokens.shape[0])

        def gradient_of(part):
            sums = jax.value_and_grad(_loss_sum(pair, objective_config), has_aux=True)
            (_, metrics), gradient = sums(state.masters, target_params, *part)
            return gradient, metrics

        whole = (rows, keys, features)
        if accumulation == 1:
            gradient, metrics = gradient_of(whole)
        else:
            # Strided parts: every device keeps the rows that it has.
            def cut(x):
                x = x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1)
                return sharding.constrain(x, None, "rows", *(None,) * (x.ndim - 2))

            def add(total, part):
                return jax.tree.map(jnp.add, total, gradient_of(part)), None

            parts = jax.tree.map(cut, whole)
            first = jax.eval_shape(gradient_of, jax.tree.map(lambda x: x[0], parts))
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)
            (gradient, metrics), _ = jax.lax.scan(add, zeros, parts)
        scale = 1 / jnp.maximum(metrics.weight, 1e-6)
        gradient = jax.tree.map(lambda x: x * scale, gradient)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in gradient.values()))
        # optax mixes python floats and arrays, Muon ranks too
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, moments = optimizer.update(gradient, state.moments, state.masters)
        masters = jax.tree.map(lambda x, update: x - rate * update, state.masters, updates)
        return TrainState(state.step + 1, masters, moments), StepReport(metrics, norm)

    placements = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(pair, optimizer_config))
    # In and out alike, or the second step would be compiled anew.
    return jax.jit(step, donate_argnums=0, out_shardings=(placements, None))


def make_validation(
    pair: Pair, config: ObjectiveConfig, *, seed: int = 0
) -> Callable[..., Metrics]:
    """A jitted (masters, target params, rows, features or None) -> sums, with the same anchors
    every time."""

    def validate(masters, target_params, rows: PackedRows, features):
        keys = row_keys(seed, jnp.int32(-1), rows.tokens.shape[0])
        return _loss_sum(pair, config)(masters, target_params, rows, keys, features)[1]

    return jax.jit(validate)


def row_keys(seed: int, step: Int[Array, ""], rows: int):
    """One key a row of the batch, a function of (seed, step, row) alone."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))


def rows_placement(pair: Pair) -> NamedSharding:
    """Where a batch's arrays go: rows over the mesh, all else whole."""
    return NamedSharding(pair.sharding.mesh, PartitionSpec(pair.sharding.rules["rows"]))


def _optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Up to its rate, which the step multiplies in: the schedule may follow the clock."""
    if config.kind == "muon":
        descent = optax.contrib.muon(1.0, consistent_rms=0.2, adam_b1=config.b1, adam_b2=config.b2)
        scaled = optax.chain(descent, optax.scale(-1.0))  # the step subtracts
    else:
        scaled = optax.scale_by_adam(b1=config.b1, b2=config.b2)
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        scaled,
        optax.add_decayed_weights(config.weight_decay),
    )


def _loss_sum(pair: Pair, config: ObjectiveConfig):
    """(masters, target params, rows, keys, features or None) -> (loss sum, metrics)."""
    stacked_draft, frozen, taps = StackedDraft.of(pair), FrozenTarget.of(pair), pair.taps
    forward = forward_on(pair.sharding.mesh)

    def loss(masters, target_params, rows: PackedRows, keys, features):
        compute = {name: value.astype(pair.dtype) for name, value in masters.items()}
        draft, target = stacked_draft.bind(compute), frozen.bind(target_params)
        if features is None:
            output = target_output(target, rows, taps, config.tiles, forward)
        elif config.loss.kl:
            raise ValueError("loss.kl needs the target in every step, not its features from disk")
        else:  # offline: what a step of this very target has written (features.py)
            output = TargetOutput(features[..., :0], features)
        metrics = objective(draft, target, rows, output, keys, config, forward)
        return metrics.weighted_loss, metrics

    return loss
