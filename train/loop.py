"""The training loop: frozen target and draft in one jitted step, float32 masters, AdamW, cosine."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.decoder import Pair
from dflash_jax.functional import Params
from train.objective import (
    Metrics,
    ObjectiveConfig,
    objective,
    target_features,
)
from train.rows import PackedRows
from train.samples import DataError


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """``batch_rows`` packed rows a step. The learning rate warms up over ``warmup`` of the run and
    falls to zero by a cosine. The run ends after ``steps``, or after ``seconds`` if that is
    sooner; the schedule follows whichever runs out first."""

    objective: ObjectiveConfig
    batch_rows: int
    learning_rate: float
    steps: int
    seconds: float = math.inf
    warmup: float = 0.04
    gradient_clip: float = 1.0
    log_every: int = 50
    seed: int = 0


class TrainingDiverged(RuntimeError):
    """The loss is not finite; the message names the step and its rows."""


def train(
    pair: Pair,
    target_params: Params,
    draft_params: Params,
    rows: PackedRows,
    config: LoopConfig,
    *,
    log: Path | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, jax.Array]:
    """Train ``draft_params`` and return them in float32.

    The target computes in its own dtype; the draft in ``pair.dtype`` from float32 masters. Rows
    are split over the mesh's data axis. ``log`` gets one JSON line every ``log_every`` steps.
    """
    assert pair.draft is not None
    mesh = pair.sharding.mesh
    split = NamedSharding(mesh, PartitionSpec("data"))
    if config.batch_rows % pair.sharding.data:
        raise ValueError(
            f"batch_rows {config.batch_rows} must be a multiple of the mesh's {pair.sharding.data} "
            "data shards"
        )
    # Copies: every step donates them, and the caller's (or the target's) arrays must live on.
    masters = {
        name: jax.device_put(jnp.array(draft_params[name], jnp.float32), leaf.sharding)
        for name, leaf in pair.draft.placed(pair.sharding).items()
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.gradient_clip),
        optax.scale_by_adam(b1=0.9, b2=0.95),
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    optimizer_state = jax.tree.map(
        lambda x: x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, everywhere),
        optimizer.init(masters),
    )
    # In and out alike, or the second step would be compiled anew.
    placements = jax.tree.map(lambda x: x.sharding, (masters, optimizer_state))
    step = jax.jit(
        make_step(pair, optimizer, config.objective),
        donate_argnums=(0, 1),
        out_shardings=(*placements, None),
    )
    order = _row_order(rows.tokens.shape[0], config.batch_rows, config.seed)
    key = jax.random.key(config.seed)
    tokens = config.batch_rows * rows.tokens.shape[1]
    with _Log(log, config.log_every, tokens, report) as steps:
        for number in range(config.steps):
            progress = max(number / config.steps, steps.seconds / config.seconds)
            if progress >= 1:
                break
            chosen = next(order)
            batch = jax.tree.map(lambda x, at=chosen: jax.device_put(x[at], split), rows)
            rate = learning_rate(config, progress)
            masters, optimizer_state, metrics = step(
                masters,
                optimizer_state,
                target_params,
                batch,
                jax.random.fold_in(key, number),
                jnp.float32(rate),
            )
            steps.add(_Step(number + 1, rate, chosen, metrics))
    return masters


def make_step(
    pair: Pair, optimizer: optax.GradientTransformation, config: ObjectiveConfig
) -> Callable[..., tuple[dict[str, jax.Array], Any, Metrics]]:
    """(masters, optimiser state, target params, rows, key, learning rate) -> (masters, optimiser
    state, metrics): gradients of the global batch's loss, whatever the mesh."""
    assert pair.draft is not None
    draft_module, target_module = pair.draft, pair.target

    def loss(masters, target_params, rows, key):
        compute = {name: value.astype(pair.dtype) for name, value in masters.items()}
        draft, target = draft_module.bind(compute), target_module.bind(target_params)
        features = target_features(target, rows, pair.taps)
        metrics = objective(draft, target, rows, features, key, config)
        return metrics.weighted_loss / jnp.maximum(metrics.weight, 1e-6), metrics

    def step(masters, state, target_params, rows, key, rate):
        (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(
            masters, target_params, rows, key
        )
        with jax.numpy_dtype_promotion("standard"):  # optax mixes python floats and arrays
            updates, state = optimizer.update(gradient, state, masters)
        masters = jax.tree.map(lambda value, update: value - rate * update, masters, updates)
        return masters, state, metrics

    return step


def learning_rate(config: LoopConfig, progress: float) -> float:
    """Linear warm-up, then a cosine to zero, over ``progress`` in 0..1."""
    if progress < config.warmup:
        return config.learning_rate * progress / config.warmup
    rest = (progress - config.warmup) / (1 - config.warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(rest, 1.0)))


def summarise(sums: list[Metrics]) -> dict[str, Any]:
    """Loss, accuracy by in-block position and teacher-forced acceptance length of metric sums."""
    total = Metrics(
        *(np.sum([np.asarray(x) for x in field], 0) for field in zip(*sums, strict=True))
    )
    blocks = max(float(total.blocks), 1.0)
    return {
        "loss": float(total.weighted_loss) / max(float(total.weight), 1e-6),
        "accept_length": 1 + float(total.accepted) / blocks,
        "accuracy": [float(x) for x in total.correct / np.maximum(total.labelled, 1)],
    }


def _row_order(rows: int, batch: int, seed: int) -> Iterator[np.ndarray]:
    """Row indices of every step: a fresh permutation an epoch, the ragged end dropped."""
    if rows < batch:
        raise DataError(f"{rows} packed rows are fewer than batch_rows {batch}")
    random = np.random.default_rng(seed)
    while True:
        permutation = random.permutation(rows)
        yield from permutation[: rows - rows % batch].reshape(-1, batch)


class _Step(NamedTuple):
    number: int
    learning_rate: float
    rows: np.ndarray
    metrics: Metrics


class _Log:
    """Steps summed up ``every`` so many, and at the end: a JSON line (where a path is given) and a
    line to the reader. Metrics stay on the device until then, so that steps are not waited for.

    Raises TrainingDiverged.
    """

    def __init__(self, path: Path | None, every: int, tokens: int, report: Callable[[str], None]):
        self._path, self._every, self._tokens, self._report = path, every, tokens, report
        self._steps: list[_Step] = []
        self._started = self._last = time.perf_counter()
        self._file: TextIO | None = None

    def __enter__(self) -> "_Log":
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._steps:  # time ran out between two lines
                self._write()
        finally:
            if self._file is not None:
                self._file.close()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def add(self, step: _Step) -> None:
        self._steps.append(step)
        if len(self._steps) == self._every:
            self._write()

    def _write(self) -> None:
        for step in self._steps:
            if not math.isfinite(loss := float(step.metrics.weighted_loss)):
                where = f"step {step.number}, rows {step.rows.tolist()}"
                raise TrainingDiverged(f"the loss is {loss} at {where}")
        record = summarise([step.metrics for step in self._steps])
        now = time.perf_counter()
        record |= {
            "step": self._steps[-1].number,
            "learning_rate": self._steps[-1].learning_rate,
            "seconds": now - self._started,
            "tokens_per_second": len(self._steps) * self._tokens / (now - self._last),
        }
        self._steps, self._last = [], now
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        self._report(
            f"step {record['step']} loss {record['loss']:.3f} "
            f"accept {record['accept_length']:.3f} first {record['accuracy'][0]:.3f} "
            f"{record['tokens_per_second']:.0f} tok/s {record['seconds']:.0f} s"
        )
