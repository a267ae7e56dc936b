"""The training loop on a language that a draft can learn: counting modulo 7."""

import dataclasses
import itertools
import json
import math
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoder import Pair, PairParams
from dflash_jax.testing import tiny_pair
from train.checkpoints import ContractError
from train.features import RowsWithFeatures, write_features
from train.initial import random_draft
from train.loop import LoopConfig, Trained, TrainingDiverged, learning_rate, train
from train.losses import LossConfig
from train.mesh import training_sharding
from train.metrics import read_records
from train.objective import ObjectiveConfig
from train.packing import PackedDataset, pack
from train.samples import DataError, Sample
from train.stacked import FrozenTarget
from train.step import OptimizerConfig

ANCHORS = ObjectiveConfig(8, LossConfig(gamma=4.0))
CONFIG = LoopConfig(
    ANCHORS,
    batch_rows=4,
    optimizer=OptimizerConfig(learning_rate=2e-2),
    steps=60,
    log_every=10,
    checkpoint_every=20,
)
POISON = 9  # a token that counting never comes to


def pair_on(*mesh: int) -> tuple[Pair, PairParams]:
    return tiny_pair(
        target={"num_layers": 2},
        draft={"num_layers": 1, "target_layer_ids": (0, 1)},
        sharding=training_sharding(*(mesh or (1, 1, 1))),
    )


def counting(documents: int, first: int = 0) -> PackedDataset:
    samples = [
        Sample(
            str(start),
            np.array([(i + start) % 7 for i in range(20)], np.int32),
            np.arange(20) >= 3,
        )
        for start in range(first, first + documents)
    ]
    return pack(samples, 40, seed=0)


ROWS = RowsWithFeatures(counting(14))


@pytest.fixture(scope="module")
def pair() -> tuple[Pair, PairParams]:
    return pair_on()


def stacked(pair: Pair, target) -> dict[str, jax.Array]:
    return FrozenTarget.of(pair).stack(target)


def run(pair, rows=ROWS, config=CONFIG, **options) -> Trained:
    pair, params = pair
    draft = random_draft(pair, params.target, seed=0)
    return train(pair, stacked(pair, params.target), draft, rows, config, **options)


def losses(work: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_records(work / "train.jsonl") if "loss" in r]


@pytest.fixture(scope="module")
def whole(pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """A run that nothing interrupts."""
    work = tmp_path_factory.mktemp("whole")
    held_out = RowsWithFeatures(counting(6, first=3))
    return work, run(pair, work=work, held_out=held_out, fingerprint="counting")


def test_it_learns_and_logs(whole) -> None:
    work, trained = whole
    records = read_records(work / "train.jsonl")
    lines = [r for r in records if "loss" in r]
    assert [line["step"] for line in lines] == [10, 20, 30, 40, 50, 60]
    assert lines[-1]["loss"] < 0.3 * lines[0]["loss"]
    assert lines[0]["accept_length"] < 2 and lines[-1]["accept_length"] > 3
    for line in lines:
        assert len(line["accuracy"]) == 3 and all(0 <= a <= 1 for a in line["accuracy"])
        assert 1 <= line["accept_length"] <= 4 and line["tokens_per_second"] > 0
        assert line["learning_rate"] == learning_rate(CONFIG.optimizer, (line["step"] - 1) / 60)
        assert line["gradient_norm"] > 0
    held_out = [r for r in records if "held_out" in r]
    assert [r["step"] for r in held_out] == [20, 40, 60]
    assert held_out[-1]["held_out"]["accept_length"] > 3
    assert trained.finished
    assert {value.dtype for value in trained.draft.values()} == {jnp.dtype(jnp.float32)}


def test_the_best_checkpoint_is_what_training_ends_with(pair, whole, tmp_path: Path) -> None:
    """Rising to a rate that destroys, the last step is not the best."""
    work, trained = whole
    scores = {
        r["step"]: r["held_out"]["accept_length"]
        for r in read_records(work / "train.jsonl")
        if "held_out" in r
    }
    assert scores[trained.step] == max(scores.values())
    optimizer = OptimizerConfig(learning_rate=1.0, warmup=1.0)
    config = dataclasses.replace(CONFIG, optimizer=optimizer, checkpoint_every=5, keep=1)
    spoilt = run(pair, config=config, work=tmp_path, held_out=ROWS)
    scores = {
        r["step"]: r["held_out"]["accept_length"]
        for r in read_records(tmp_path / "train.jsonl")
        if "held_out" in r
    }
    assert scores[60] < max(scores.values()) == scores[spoilt.step]


def test_a_run_that_sigterm_stopped_goes_on_bit_for_bit(pair, whole, tmp_path: Path) -> None:
    """The signal ends the run after its step, with a checkpoint; the same call takes it up."""
    work, expected = whole
    options = {"held_out": RowsWithFeatures(counting(6, first=3)), "fingerprint": "counting"}

    class Signalling(RowsWithFeatures):
        def __getitem__(self, rows: np.ndarray, /):
            self.reads = getattr(self, "reads", 0) + 1
            if self.reads == 17:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            return super().__getitem__(rows)

    stopped = run(pair, Signalling(counting(14)), work=tmp_path, **options)
    assert not stopped.finished and 0 < stopped.step < 60
    resumed = run(pair, work=tmp_path, **options)
    assert resumed.finished and resumed.step == expected.step
    for name, value in expected.draft.items():
        np.testing.assert_array_equal(resumed.draft[name], value)
    assert [s for s, _ in losses(tmp_path) if s % 10 == 0] == [s for s, _ in losses(work)]
    after = dict(losses(tmp_path))
    late = [s for s, _ in losses(work) if s > stopped.step + 10]
    assert late and all(after[s] == dict(losses(work))[s] for s in late)


def test_a_finished_run_is_not_run_again(pair, whole) -> None:
    work, expected = whole
    before = losses(work)
    options = {"held_out": RowsWithFeatures(counting(6, first=3)), "fingerprint": "counting"}
    again = run(pair, work=work, **options)
    assert again.finished and losses(work) == before
    for name, value in expected.draft.items():
        np.testing.assert_array_equal(again.draft[name], value)


def test_another_run_in_the_same_folder_is_refused_by_name(pair, whole) -> None:
    work, _ = whole
    with pytest.raises(ContractError, match="data: .* 'counting', this run has 'other'"):
        run(pair, work=work, fingerprint="other")
    objective = ObjectiveConfig(8, LossConfig(gamma=7.0))
    config = dataclasses.replace(CONFIG, objective=objective)
    with pytest.raises(ContractError, match=r"objective.loss.gamma: .* 4.0, this run has 7.0"):
        run(pair, config=config, work=work, fingerprint="counting")
    model, params = pair
    name = "model.norm.weight"
    other = PairParams({**params.target, name: params.target[name] + 1}, params.draft)
    with pytest.raises(ContractError, match="target.weights: "):
        run((model, other), work=work, fingerprint="counting")


def test_it_goes_on_on_another_mesh(pair, tmp_path: Path) -> None:
    """To tolerance, since sums over devices have another order: as the run that stays on one."""
    config = dataclasses.replace(CONFIG, steps=24, log_every=1, checkpoint_every=12)
    expected = run(pair, config=config, work=tmp_path / "one")
    shutil.copytree(tmp_path / "one", work := tmp_path / "two")
    shutil.rmtree(work / "checkpoints" / "24")
    resumed = run(pair_on(1, 2, 2), config=dataclasses.replace(config, accumulation=2), work=work)
    assert resumed.step == 24
    name = "layers.0.mlp.up_proj.kernel"
    assert resumed.draft[name].sharding.spec == jax.sharding.PartitionSpec("fsdp", "model")
    curves = (np.array(losses(tmp_path / name)) for name in ("two", "one"))
    np.testing.assert_allclose(*curves, rtol=1e-3)
    for name, value in expected.draft.items():
        # A rate of 2e-2 over 12 steps moves weights by tenths; lost moments would show as much.
        np.testing.assert_allclose(resumed.draft[name], value, atol=5e-3)


def test_features_from_disk_give_the_same_loss(pair, tmp_path: Path) -> None:
    model, params = pair
    dataset, contract = counting(14), {"target": "a", "taps": [0, 1]}
    folder = tmp_path / "features"
    for _ in range(2):  # the second finds everything done
        write_features(
            model,
            stacked(model, params.target),
            dataset,
            folder,
            contract,
            batch_rows=3,
            report=lambda line: None,
        )
    config = dataclasses.replace(CONFIG, steps=6, log_every=1)
    online = run(pair, config=config, work=tmp_path / "online")
    stored = RowsWithFeatures(dataset, folder, contract)
    offline = run(pair, stored, config=config, work=tmp_path / "offline")
    np.testing.assert_allclose(
        *(np.array(losses(tmp_path / name)) for name in ("online", "offline")), rtol=1e-6
    )
    for name, value in online.draft.items():
        np.testing.assert_allclose(offline.draft[name], value, atol=1e-5)
    with pytest.raises(DataError, match=r"made from something else: target: 'a', now 'b'"):
        RowsWithFeatures(dataset, folder, {**contract, "target": "b"})
    victim = next(folder.glob("*/*3.npz"))
    victim.write_bytes(victim.read_bytes()[:50])
    with pytest.raises(DataError, match="holds no features"):
        stored[np.array([3])]
    victim.unlink()
    with pytest.raises(DataError, match="lacks the features of 1 of 7 rows, the first of row 3"):
        RowsWithFeatures(dataset, folder, contract)


@pytest.mark.parametrize("tick", [0.013, 0.017, 0.02])
def test_a_budget_of_seconds_ends_the_run_and_the_schedule(
    pair, tick: float, tmp_path: Path, monkeypatch
) -> None:
    """Each look at the clock is ``tick`` later than the one before: the end falls between any two
    lines of the loop, on a log line or off it."""
    clock = (tick * n for n in itertools.count())
    monkeypatch.setattr("train.loop.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    never = 10**9
    config = dataclasses.replace(
        CONFIG, steps=never, seconds=2.0, log_every=5, checkpoint_every=never
    )
    assert run(pair, config=config, work=tmp_path).finished
    *_, line = records = read_records(tmp_path / "train.jsonl")
    assert line["seconds"] >= 2.0
    # By the number of steps the rate would still be at the very start of its rise.
    peak, rates = config.optimizer.learning_rate, [r["learning_rate"] for r in records]
    assert max(rates) > 0.5 * peak and rates[-1] < 0.1 * peak
    before = line["step"]
    assert run(pair, config=config, work=tmp_path).step == before  # the budget is spent


def test_learning_rate() -> None:
    """Linear over the first 4 %, then half a cosine down to zero."""
    config = OptimizerConfig(learning_rate=2.0)
    at = [0, 0.01, 0.02, 0.04, 0.52, 0.76, 1]
    expected = [0, 0.5, 1, 2, 1, 1 + math.cos(0.75 * math.pi), 0]
    np.testing.assert_allclose([learning_rate(config, p) for p in at], expected, atol=1e-12)
    without = dataclasses.replace(config, warmup=0.0)
    assert [learning_rate(without, p) for p in (0, 1)] == [2.0, 0.0]


def test_a_gradient_that_is_not_finite_stops_the_run(pair, tmp_path: Path) -> None:
    """The loss of that step still is finite: its weights are the ones before."""
    model, params = pair
    name = "layers.0.mlp.down_proj.kernel"
    huge = {**params.draft, name: params.draft[name].at[0, 0].set(3e38)}
    config = dataclasses.replace(CONFIG, steps=1)
    with pytest.raises(TrainingDiverged, match=r"is (nan|inf) at step 1, rows \["):
        train(model, stacked(model, params.target), huge, ROWS, config, work=tmp_path)
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize("steps", [4, 10])
def test_a_loss_that_is_not_finite_stops_the_run(pair, steps: int, tmp_path: Path) -> None:
    """Step and rows are named, also where the run ends before a log line is due, and no checkpoint
    of such a state is written."""
    pair, params = pair
    dataset = counting(14)
    tokens = np.array(dataset.tokens)
    tokens[5, 20] = POISON
    rows = RowsWithFeatures(dataclasses.replace(dataset, tokens=tokens))
    name = "model.embed_tokens.weight"
    target = {**params.target, name: params.target[name].at[POISON].set(jnp.nan)}
    config = dataclasses.replace(CONFIG, steps=steps, log_every=7)
    with pytest.raises(TrainingDiverged, match=r"the loss is nan at step [1-4], rows \[") as info:
        train(pair, stacked(pair, target), params.draft, rows, config, work=tmp_path)
    assert 5 in json.loads(str(info.value).partition("rows ")[2])
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


def test_too_few_rows_and_ragged_batches_are_refused(pair) -> None:
    with pytest.raises(DataError, match="1 packed rows are fewer than batch_rows 4"):
        run(pair, RowsWithFeatures(counting(2)))
    uneven = dataclasses.replace(CONFIG, batch_rows=3)
    with pytest.raises(DataError, match="a part of 3 rows .* 2 data x fsdp shards"):
        run(pair_on(1, 2, 1), config=uneven)
    for field, value, match in [
        ("steps", None, "one of steps and epochs"), ("epochs", 1.0, "one of steps and epochs"),
        ("accumulation", 3, "accumulation 3 must divide batch_rows 4"),
        ("log_every", 0, "log_every must be at least 1"), ("steps", 0, "steps must be at least 1"),
        ("seconds", 0.0, "seconds must be more than 0"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            dataclasses.replace(CONFIG, **{field: value})


def test_epochs_are_steps() -> None:
    config = dataclasses.replace(CONFIG, steps=None, epochs=1.5)
    assert config.total_steps(10) == 4
