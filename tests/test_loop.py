"""The training loop on a language that a draft can learn: counting modulo 7."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoder import Pair, PairParams
from dflash_jax.sharding import Sharding, make_mesh
from dflash_jax.testing import compilations, tiny_pair
from train.initial import random_draft
from train.loop import LoopConfig, TrainingDiverged, learning_rate, train
from train.objective import Metrics, ObjectiveConfig, objective, target_features
from train.packing import pack
from train.rows import PackedRows
from train.samples import DataError, Sample

ANCHORS = ObjectiveConfig(anchors=8, gamma=4.0, anchor_group=4)
CONFIG = LoopConfig(ANCHORS, batch_rows=4, learning_rate=2e-2, steps=100, log_every=25)
POISON = 9  # a token that counting never comes to


def pair_on(data: int = 1, model: int = 1) -> tuple[Pair, PairParams]:
    return tiny_pair(
        target={"num_layers": 2},
        draft={"num_layers": 1, "target_layer_ids": (0, 1)},
        sharding=Sharding(make_mesh(data, model)),
    )


def counting(documents: int) -> PackedRows:
    samples = [
        Sample("", np.array((np.arange(20) + start) % 7, np.int32), np.arange(20) >= 3)
        for start in range(documents)
    ]
    return pack(samples, 40, seed=0)[:]


@pytest.fixture(scope="module")
def pair() -> tuple[Pair, PairParams]:
    return pair_on()


def silent(line: str) -> None:
    pass


def run(pair, rows, config=CONFIG, **options) -> dict[str, np.ndarray]:
    pair, params = pair
    draft = random_draft(pair, params.target, seed=0)
    trained = train(pair, params.target, draft, rows, config, report=silent, **options)
    return {name: np.asarray(value) for name, value in trained.items()}


def test_it_learns_and_logs_and_repeats_bit_for_bit(pair, tmp_path: Path) -> None:
    rows, log = counting(14), tmp_path / "made" / "train.jsonl"
    trained = run(pair, rows, log=log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [25, 50, 75, 100]
    assert lines[-1]["loss"] < 0.3 * lines[0]["loss"]
    assert lines[0]["accept_length"] < 2 and lines[-1]["accept_length"] > 3
    for line in lines:
        assert len(line["accuracy"]) == 3 and all(0 <= a <= 1 for a in line["accuracy"])
        assert 1 <= line["accept_length"] <= 4 and line["tokens_per_second"] > 0
        assert line["learning_rate"] == learning_rate(CONFIG, (line["step"] - 1) / 100)
    again = run(pair, rows, log=log)
    for name, value in trained.items():
        np.testing.assert_array_equal(value, again[name])
    repeated = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["loss"] for line in repeated] == [line["loss"] for line in lines]


def test_what_the_caller_gave_lives_on(pair) -> None:
    """The steps donate their masters; those are copies, even where a draft starts as the target's
    own arrays in float32."""
    pair, params = pair
    shared = {**params.draft, "norm.weight": params.target["model.norm.weight"]}
    config = dataclasses.replace(CONFIG, steps=2)
    train(pair, params.target, shared, counting(14), config, report=silent)
    assert not any(value.is_deleted() for value in (*shared.values(), *params.target.values()))


def test_steps_after_the_last_full_line_are_logged_too(pair, tmp_path: Path) -> None:
    log = tmp_path / "train.jsonl"
    run(pair, counting(14), dataclasses.replace(CONFIG, steps=3, log_every=2), log=log)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [2, 3]


def test_a_budget_of_seconds_ends_the_run_and_the_schedule(pair, tmp_path: Path) -> None:
    log = tmp_path / "train.jsonl"
    config = dataclasses.replace(CONFIG, steps=10**9, seconds=2.0, log_every=10**9)
    run(pair, counting(14), config, log=log)
    (line,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert line["seconds"] >= 2.0
    assert line["learning_rate"] < CONFIG.learning_rate


def test_learning_rate() -> None:
    """Linear over the first 4 %, then half a cosine down to zero."""
    config = dataclasses.replace(CONFIG, learning_rate=2.0)
    at = [0, 0.01, 0.02, 0.04, 0.52, 0.76, 1]
    expected = [0, 0.5, 1, 2, 1, 1 + math.cos(0.75 * math.pi), 0]
    np.testing.assert_allclose([learning_rate(config, p) for p in at], expected, atol=1e-12)
    without = dataclasses.replace(config, warmup=0.0)
    assert [learning_rate(without, p) for p in (0, 1)] == [2.0, 0.0]


@pytest.mark.parametrize("steps", [4, 10])
def test_a_loss_that_is_not_finite_stops_the_run(pair, steps: int) -> None:
    """Step and rows are named, also where the run ends before a log line is due."""
    pair, params = pair
    rows = counting(14)
    tokens = np.array(rows.tokens)
    tokens[5, 20] = POISON
    rows = dataclasses.replace(rows, tokens=tokens)
    name = "model.embed_tokens.weight"
    target = {**params.target, name: params.target[name].at[POISON].set(jnp.nan)}
    config = dataclasses.replace(CONFIG, steps=steps, log_every=7)
    with pytest.raises(TrainingDiverged, match=r"the loss is nan at step [1-4], rows \[") as info:
        train(pair, target, params.draft, rows, config, report=silent)
    assert 5 in json.loads(str(info.value).partition("rows ")[2])


def test_too_few_rows_and_ragged_batches_are_refused(pair) -> None:
    with pytest.raises(DataError, match="1 packed rows are fewer than batch_rows 4"):
        run(pair, counting(2))
    uneven = dataclasses.replace(CONFIG, batch_rows=3)
    with pytest.raises(ValueError, match="batch_rows 3 must be a multiple of .* 2 data shards"):
        run(pair_on(2, 1), counting(14), uneven)


def run_unevenly(pair, folder: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    """(losses, weights) of three steps over rows of unlike numbers of labels, so that a mean of
    means would show."""
    rows = counting(14)
    lengths = np.arange(rows.tokens.shape[0])[:, None] * 3 + 3
    rows = dataclasses.replace(rows, loss_mask=np.arange(40)[None, :] < lengths)
    config = dataclasses.replace(CONFIG, steps=3, log_every=1, warmup=0.0)
    weights = run(pair, rows, config, log=folder / "log")
    losses = [json.loads(line)["loss"] for line in (folder / "log").read_text().splitlines()]
    return losses, weights


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory: pytest.TempPathFactory):
    return run_unevenly(pair, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (2, 2)], ids=str)
def test_loss_and_weights_do_not_depend_on_the_mesh(alone, mesh, tmp_path: Path) -> None:
    """Fault 47."""
    losses, weights = run_unevenly(pair_on(*mesh), tmp_path)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    for name, value in alone[1].items():
        # Adam divides by the gradient's own size: float32 sums in another order show where a
        # gradient is nearly 0. A wrong loss would move weights by the rate itself.
        near = 0.02 * CONFIG.learning_rate
        np.testing.assert_allclose(weights[name], value, atol=near, rtol=1e-4)


def test_the_step_compiles_once(pair) -> None:
    """A mesh is where shardings would change between the first step and the second."""
    with compilations() as one:
        run(pair, counting(14), dataclasses.replace(CONFIG, steps=1))
    with compilations() as three:
        run(pair, counting(14), dataclasses.replace(CONFIG, steps=3))
    assert len(three) <= len(one)


def test_halves_of_a_batch_add_up(pair) -> None:
    """Fault 47, with every anchor drawn, so that the halves draw what the whole does."""
    pair, params = pair
    rows = jax.tree.map(lambda x: x[:4], counting(14))
    config = ObjectiveConfig(anchors=40, gamma=4.0, anchor_group=40)

    @jax.jit
    def sums(rows: PackedRows) -> Metrics:
        draft, target = pair.draft.bind(params.draft), pair.target.bind(params.target)
        features = target_features(target, rows, pair.taps)
        return objective(draft, target, rows, features, jax.random.key(0), config)

    whole = sums(rows)
    halves = [sums(jax.tree.map(lambda x, at=at: x[at], rows)) for at in (slice(2), slice(2, 4))]
    for name in Metrics._fields:
        added = sum(np.asarray(getattr(half, name)) for half in halves)
        np.testing.assert_allclose(added, getattr(whole, name), rtol=1e-5)


def test_masters_stay_float32_while_the_draft_computes_in_bfloat16(pair) -> None:
    """Steps of 1e-5 vanish in bfloat16 weights of about 0.2, and add up in float32."""
    pair32, params = pair
    narrow = Pair.of(
        pair32.target_config, pair32.draft_config, pair32.sharding, jnp.dtype(jnp.bfloat16)
    )
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    config = dataclasses.replace(CONFIG, learning_rate=1e-5, warmup=0.0, steps=3)
    trained = train(narrow, low.target, low.draft, counting(14), config, report=silent)
    assert {value.dtype for value in trained.values()} == {jnp.dtype(jnp.float32)}
    name = "layers.0.mlp.up_proj.kernel"
    moved = np.abs(np.asarray(trained[name]) - np.asarray(low.draft[name], np.float32))
    assert 1e-6 < np.median(moved) < 4e-5
