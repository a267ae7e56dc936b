"""The training loop: batches in, steps, held-out scores, checkpoints, and a draft at the end."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoder import Pair
from dflash_jax.functional import Params
from dflash_jax.sharding import Sharding
from train.batches import Batch, Batches, RowSource, on_mesh
from train.checkpoints import Checkpoints
from train.contract import contract_of
from train.losses import Metrics
from train.mesh import row_shards
from train.metrics import MetricsLog, Progress, read_records
from train.objective import ObjectiveConfig
from train.preemption import Preemption
from train.rows import TrainingRows
from train.samples import DataError
from train.step import (
    OptimizerConfig,
    Step,
    StepReport,
    TrainState,
    abstract_state,
    init_state,
    make_step,
    make_validation,
    rows_placement,
)


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """``batch_rows`` packed rows a step, in ``accumulation`` parts. The run ends after ``steps`` or
    ``epochs`` (one of them), or after ``seconds`` if that is sooner; the rate's schedule follows
    whichever runs out first, so that only a run without ``seconds`` resumes bit for bit.
    Every ``checkpoint_every`` steps the held-out rows are scored and a checkpoint is written: the
    last ``keep`` and the best stay."""

    objective: ObjectiveConfig
    batch_rows: int
    optimizer: OptimizerConfig = OptimizerConfig()
    accumulation: int = 1
    steps: int | None = None
    epochs: float | None = None
    seconds: float = math.inf
    log_every: int = 50
    checkpoint_every: int = 1000
    keep: int = 2
    seed: int = 0

    def __post_init__(self):
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give one of steps and epochs, got {self.steps} and {self.epochs}")
        for name in (
            "batch_rows",
            "accumulation",
            "log_every",
            "checkpoint_every",
            "keep",
            "steps",
        ):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"loop.{name} must be at least 1, got {value}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"loop.seed must be in 0..{2**32 - 1}, got {self.seed}")
        for name in ("epochs", "seconds"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"loop.{name} must be more than 0, got {value}")
        if self.batch_rows % self.accumulation:
            raise ValueError(
                f"loop.accumulation {self.accumulation} must divide batch_rows {self.batch_rows}"
            )

    def total_steps(self, rows: int) -> int:
        """Steps of a run over a data set of ``rows`` rows."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(math.ceil(self.epochs * rows / self.batch_rows), 1)


class TrainingDiverged(RuntimeError):
    """The loss is not finite; the message names the step and its rows."""


class Trained(NamedTuple):
    """``draft``: in float32, of the best checkpoint where there are held-out rows, else the last.
    ``finished``: false where a signal ended the run early."""

    draft: Params
    step: int
    finished: bool


def train(
    pair: Pair,
    target: Params,
    draft: Mapping[str, jax.Array],
    rows: RowSource[TrainingRows],
    config: LoopConfig,
    *,
    held_out: RowSource[TrainingRows] | None = None,
    work: Path | None = None,
    fingerprint: str = "",
) -> Trained:
    """Train ``draft`` on ``rows``; the target computes in its own dtype, the draft in
    ``pair.dtype`` from float32 masters. ``target``: stacked (FrozenTarget.stack), so that nobody
    need hold its weights twice.

    ``work`` gets train.jsonl, tensorboard/ and checkpoints/, and is where a run that was killed or
    signalled goes on; ``fingerprint`` names the data in its contract. Without it nothing is
    written.

    Raises DataError, TrainingDiverged, ContractError, CheckpointError.
    """
    total = config.total_steps(len(rows))
    check_rows_split(config, pair.sharding)
    if math.isfinite(config.seconds) and jax.process_count() > 1:
        raise DataError(
            "a budget in seconds is for one process: clocks differ; give steps or epochs"
        )
    step = make_step(
        pair,
        config.objective,
        config.optimizer,
        accumulation=config.accumulation,
        seed=config.seed,
    )
    placement = rows_placement(pair)
    batches = Batches(rows, config.batch_rows, seed=config.seed, placement=placement)
    validation = None
    if held_out is not None and len(held_out):
        validation = _Validation(pair, config, held_out)
    with contextlib.ExitStack() as stack:
        checkpoints, found, spent = None, None, 0.0
        if work is not None:
            contract = contract_of(pair, target, config, fingerprint)
            checkpoints = Checkpoints(work / "checkpoints", contract, keep=config.keep)
            checkpoints = stack.enter_context(checkpoints)
            found = checkpoints.restore(abstract_state(pair, config.optimizer))
        state = found[1] if found else init_state(pair, draft, config.optimizer)
        start = int(state.step)
        if work is not None and start:
            records = read_records(work / "train.jsonl")
            spent = max((r.get("seconds", 0) for r in records if r["step"] <= start), default=0)
        progress = stack.enter_context(Progress(total, start=start))
        log = work and stack.enter_context(MetricsLog(work, resume_step=start))
        preemption = stack.enter_context(Preemption())
        run = _Run(step, target, config, total, progress, log, spent)
        finished, saved = True, start
        for batch in _until(start if run.out_of_time else total, batches, start):
            state, done = run.advance(state, batch)
            finished = not preemption.requested(done)
            ends = done == total or run.out_of_time or not finished
            due = ends or done % config.checkpoint_every == 0
            if due or done % config.log_every == 0:
                # After the clock was read: the last record is where the next process reads what
                # of the budget is spent, so it may not be older than the decision to end.
                run.write_log(done)
            if due:
                score = None
                if validation is not None and finished:
                    held = validation.score(state.masters, target)
                    run.write(done, {"held_out": held})
                    score = held["accept_length"]
                if checkpoints is not None:
                    checkpoints.save(done, state, score=score)
                saved = done
                run.resume()
            if ends:
                break
        if checkpoints is not None and finished and checkpoints.best_step not in (None, saved):
            restored = checkpoints.restore(
                abstract_state(pair, config.optimizer), step=checkpoints.best_step
            )
            assert restored is not None
            state = restored[1]
    return Trained(state.masters, int(state.step), finished)


def check_rows_split(config: LoopConfig, sharding: Sharding) -> None:
    """Raises DataError where the mesh does not divide the rows of a part of a batch."""
    shards = row_shards(sharding)
    part = config.batch_rows // config.accumulation
    if part % shards:
        raise DataError(
            f"a part of {part} rows (batch_rows / accumulation) cannot be split over the mesh's "
            f"{shards} data x fsdp shards"
        )


def learning_rate(config: OptimizerConfig, progress: float) -> float:
    """Linear warm-up, then a cosine to zero, over ``progress`` in 0..1."""
    if progress < config.warmup:
        return config.learning_rate * progress / config.warmup
    rest = (progress - config.warmup) / max(1 - config.warmup, 1e-9)
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


def _until(total: int, batches: Batches[TrainingRows], start: int) -> Iterator[Batch[TrainingRows]]:
    """Batches of steps start..total-1; the thread that makes them ends with this."""
    with contextlib.closing(batches.iterate(start)) as endless:  # pyright: ignore[reportArgumentType]
        for batch in endless:
            if batch.step >= total:
                return
            yield batch


class _Done(NamedTuple):
    """A step whose report may still be on its way."""

    step: int
    rows_index: np.ndarray
    rate: float
    report: StepReport


class _Run:
    """Steps of one process's run, their clock and their log. Metrics stay on the device until a
    line is due; the host runs two steps ahead of the device and no more, so that a signal or the
    end of a budget is met within two steps."""

    def __init__(
        self,
        step: Step,
        target_params: Params,
        config: LoopConfig,
        total: int,
        progress: Progress,
        log: MetricsLog | None,
        spent: float,
    ):
        """``spent``: seconds of the budget that earlier processes have used."""
        self._step, self._target, self._config, self._total = step, target_params, config, total
        self._progress, self._log, self._spent = progress, log, spent
        self._pending: list[_Done] = []
        self._started: float | None = None
        self._last = 0.0
        self._tokens = 0

    @property
    def seconds(self) -> float:
        """Of training so far; the first step, which compiles, is not in it."""
        now = time.perf_counter()
        return self._spent + (0.0 if self._started is None else now - self._started)

    @property
    def out_of_time(self) -> bool:
        return self.seconds >= self._config.seconds

    def advance(self, state: TrainState, batch: Batch[TrainingRows]) -> tuple[TrainState, int]:
        """(new state, how many steps are done)."""
        progress = max(batch.step / self._total, self.seconds / self._config.seconds)
        rate = learning_rate(self._config.optimizer, min(progress, 1.0))
        rows, features = batch.rows
        if len(self._pending) >= 2:
            jax.block_until_ready(self._pending[-2].report)
        state, report = self._step(state, self._target, rows, features, jnp.float32(rate))
        done = batch.step + 1
        self._pending.append(_Done(done, batch.rows_index, rate, report))
        if self._started is None:
            jax.block_until_ready(report)
            self._started = self._last = time.perf_counter()
        else:
            self._tokens += rows.tokens.size
        self._progress.move(done)
        return state, done

    def resume(self) -> None:
        """Behind scores and checkpoints, whose time says nothing of how fast steps are."""
        self._last = time.perf_counter()

    def write_log(self, done: int) -> None:
        """A record of the steps since the last one. Raises TrainingDiverged."""
        if not self._pending:
            return
        reports = jax.device_get([past.report for past in self._pending])
        for past, report in zip(self._pending, reports, strict=True):
            # A gradient that is not finite spoils the weights under a loss that still is.
            for name, value in (
                ("loss", report.metrics.weighted_loss),
                ("gradient's norm", report.gradient_norm),
            ):
                if not math.isfinite(value):
                    where = f"step {past.step}, rows {past.rows_index.tolist()}"
                    raise TrainingDiverged(f"the {name} is {value} at {where}")
        now = time.perf_counter()
        record = summarise([report.metrics for report in reports]) | {
            "gradient_norm": float(np.mean([report.gradient_norm for report in reports])),
            "learning_rate": self._pending[-1].rate,
            "seconds": self.seconds,
        }
        if self._tokens:  # not of the first step alone, whose time is not counted
            record["tokens_per_second"] = self._tokens / max(now - self._last, 1e-9)
        self._pending, self._tokens, self._last = [], 0, now
        self.write(done, record)

    def write(self, step: int, record: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(step, record)
        held_out = record.get("held_out")
        if held_out is None:
            self._progress.show(step, record)
        else:
            loss, tau = held_out["loss"], held_out["accept_length"]
            self._progress.say(f"step {step}: held-out loss {loss:.3f}, tau {tau:.2f}")


class _Validation:
    """Teacher-forced scores on held-out rows, always with the same anchors."""

    def __init__(self, pair: Pair, config: LoopConfig, rows: RowSource[TrainingRows]):
        shards = row_shards(pair.sharding)
        size = config.batch_rows // config.accumulation
        size = min(size, len(rows) // shards * shards)
        if size == 0:
            raise DataError(
                f"{len(rows)} held-out rows are fewer than the mesh's {shards} row shards"
            )
        # In order, so that nothing depends on the seed; the ragged end is left out.
        self._batches = [
            on_mesh(rows[np.arange(at, at + size)], rows_placement(pair))
            for at in range(0, len(rows) - size + 1, size)
        ]
        self._validate = make_validation(pair, config.objective, seed=config.seed)

    def score(self, masters: Params, target_params: Params) -> dict[str, Any]:
        sums = [self._validate(masters, target_params, *batch) for batch in self._batches]
        return summarise(jax.device_get(sums))
