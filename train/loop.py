"""The training loop: frozen target and draft in one jitted step, float32 masters, AdamW, cosine."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    PackedRows,
    objective,
    target_features,
)


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
    masters = {name: value.astype(jnp.float32) for name, value in draft_params.items()}
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.gradient_clip),
        optax.scale_by_adam(b1=0.9, b2=0.95),
    )
    optimizer_state = optimizer.init(masters)
    step = jax.jit(make_step(pair, optimizer, config.objective), donate_argnums=(0, 1))
    order = _row_order(rows.tokens.shape[0], config.batch_rows, config.seed)
    key = jax.random.key(config.seed)
    started = last = time.perf_counter()
    sums: list[Metrics] = []
    with _Log(log) as write:
        for number in range(config.steps):
            elapsed = time.perf_counter() - started
            progress = max(number / config.steps, elapsed / config.seconds)
            if progress >= 1:
                break
            chosen = next(order)
            batch = jax.tree.map(lambda x, at=chosen: jax.device_put(x[at], split), rows)
            rate = jnp.float32(learning_rate(config, progress))
            masters, optimizer_state, metrics = step(
                masters,
                optimizer_state,
                target_params,
                batch,
                jax.random.fold_in(key, number),
                rate,
            )
            sums.append(metrics)
            if len(sums) == config.log_every or number == config.steps - 1:
                record = summarise(sums)
                now = time.perf_counter()
                tokens = len(sums) * config.batch_rows * rows.tokens.shape[1]
                record |= {
                    "step": number + 1,
                    "learning_rate": float(rate),
                    "seconds": now - started,
                    "tokens_per_second": tokens / (now - last),
                }
                if not math.isfinite(record["loss"]):
                    raise TrainingDiverged(
                        f"loss {record['loss']} within steps {number + 2 - len(sums)}..{number + 1}"
                        f"; rows of the last: {chosen.tolist()}"
                    )
                write(record)
                report(
                    f"step {record['step']} loss {record['loss']:.3f} "
                    f"accept {record['accept_length']:.3f} first {record['accuracy'][0]:.3f} "
                    f"{record['tokens_per_second']:.0f} tok/s {record['seconds']:.0f} s"
                )
                sums, last = [], now
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
        raise ValueError(f"{rows} packed rows are fewer than batch_rows {batch}")
    random = np.random.default_rng(seed)
    while True:
        permutation = random.permutation(rows)
        yield from permutation[: rows - rows % batch].reshape(-1, batch)


class _Log:
    """JSON lines, one a record; nothing where no path is given."""

    def __init__(self, path: Path | None):
        self._path = path

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        if self._path is None:
            return lambda record: None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._file = self._path.open("w", encoding="utf-8")

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        return write

    def __exit__(self, *exc: object) -> None:
        if self._path is not None:
            self._file.close()
