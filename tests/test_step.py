"""One training step: equal on every mesh and for every accumulation, and where arrays go."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dflash_jax.decoder import Pair, PairParams
from dflash_jax.testing import compilations, tiny_pair
from train.initial import random_draft
from train.losses import LossConfig
from train.mesh import training_sharding
from train.objective import ObjectiveConfig, target_output
from train.rows import PackedRows
from train.stacked import FrozenTarget
from train.step import OptimizerConfig, init_state, make_step, make_validation, rows_placement

ROWS, LENGTH = 8, 40
OBJECTIVE = ObjectiveConfig(12, LossConfig(gamma=4.0, slice_blocks=5))
OPTIMIZER = OptimizerConfig(learning_rate=1e-2)
RATE = jnp.float32(1e-2)


def batch(seed: int = 0) -> PackedRows:
    """Rows of unlike numbers of labels, so that a mean of means would show."""
    random = np.random.default_rng(seed)
    segments = np.repeat(np.array([[1] * 20 + [2] * 15 + [0] * 5], np.int32), ROWS, axis=0)
    positions = np.array([[*range(20), *range(15), *range(5)]] * ROWS, np.int32)
    tokens = random.integers(0, 30, (ROWS, LENGTH), np.int32)
    mask = np.arange(LENGTH)[None, :] < np.arange(ROWS)[:, None] * 4 + 8
    return PackedRows(*map(jnp.asarray, (tokens, segments, positions, mask & (segments > 0))))


def pair_on(*mesh: int) -> tuple[Pair, PairParams]:
    return tiny_pair(
        target={"num_layers": 2},
        draft={"num_layers": 1, "target_layer_ids": (0, 1)},
        sharding=training_sharding(*(mesh or (1, 1, 1))),
    )


def stacked(pair: Pair, params: PairParams) -> dict[str, jax.Array]:
    return FrozenTarget.of(pair).stack(params.target)


def run(mesh: tuple[int, ...], accumulation: int = 1, steps: int = 2):
    """(losses, gradient norms, masters) of a few steps."""
    pair, params = pair_on(*mesh)
    draft = random_draft(pair, params.target, seed=0)
    step = make_step(pair, OBJECTIVE, OPTIMIZER, accumulation=accumulation)
    state = init_state(pair, draft, OPTIMIZER)
    reports = []
    for number in range(steps):
        rows = jax.device_put(batch(number), rows_placement(pair))
        state, report = step(state, stacked(pair, params), rows, None, RATE)
        reports.append(report)
    losses = [float(r.metrics.weighted_loss / r.metrics.weight) for r in reports]
    return losses, [float(r.gradient_norm) for r in reports], jax.device_get(state.masters)


@pytest.fixture(scope="module")
def alone():
    return run((1, 1, 1))


@pytest.mark.parametrize(
    ("mesh", "accumulation"),
    [
        ((1, 1, 1), 2),
        ((2, 1, 1), 1),
        ((1, 4, 1), 1),
        ((1, 1, 2), 1),
        ((2, 2, 1), 2),
        ((1, 2, 2), 4),
    ],
    ids=str,
)
def test_mesh_and_accumulation_change_nothing(alone, mesh, accumulation: int) -> None:
    """Fault 47: sums over all devices and the whole accumulation window."""
    losses, norms, masters = run(mesh, accumulation)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    np.testing.assert_allclose(norms, alone[1], rtol=1e-4)
    for name, value in alone[2].items():
        # Adam divides by the gradient's own size: float32 sums in another order show where a
        # gradient is nearly 0. A wrong loss would move weights by the rate itself.
        np.testing.assert_allclose(masters[name], value, atol=0.02 * float(RATE), rtol=1e-4)


def test_weights_masters_and_moments_are_split_over_fsdp() -> None:
    pair, params = pair_on(1, 2, 2)
    state = init_state(pair, params.draft, OPTIMIZER)
    name = "layers.0.mlp.up_proj.kernel"
    adam = next(part for part in state.moments if hasattr(part, "mu"))
    for placed in (params.draft[name], state.masters[name], adam.mu[name], adam.nu[name]):
        assert placed.sharding.spec == PartitionSpec("fsdp", "model")
    target = stacked(pair, params)["model.layers.mlp.down_proj.kernel"]
    assert target.sharding.spec == PartitionSpec(None, "model", "fsdp")
    assert rows_placement(pair).spec == PartitionSpec(("data", "fsdp"))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_step_compiles_once(kind) -> None:
    pair, params = pair_on(2, 2, 1)
    optimizer = dataclasses.replace(OPTIMIZER, kind=kind)
    step = make_step(pair, OBJECTIVE, optimizer)
    state = init_state(pair, params.draft, optimizer)
    rows, target = jax.device_put(batch(), rows_placement(pair)), stacked(pair, params)
    state, _ = step(state, target, rows, None, RATE)
    with compilations() as events:
        for _ in range(2):
            state, _ = step(state, target, rows, None, RATE)
    assert not events


def test_what_the_caller_gave_lives_on() -> None:
    """The steps donate their masters; those are copies, even where a draft starts as the target's
    own arrays in float32."""
    pair, params = pair_on()
    shared = {**params.draft, "norm.weight": params.target["model.norm.weight"]}
    step = make_step(pair, OBJECTIVE, OPTIMIZER)
    step(init_state(pair, shared, OPTIMIZER), stacked(pair, params), batch(), None, RATE)
    assert not any(value.is_deleted() for value in (*shared.values(), *params.target.values()))


def test_masters_stay_float32_while_the_draft_computes_in_bfloat16() -> None:
    """Steps of 1e-5 vanish in bfloat16 weights of about 0.2, and add up in float32."""
    pair32, params = pair_on()
    narrow = Pair.of(
        pair32.target_config, pair32.draft_config, pair32.sharding, jnp.dtype(jnp.bfloat16)
    )
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    step = make_step(narrow, OBJECTIVE, OPTIMIZER)
    state = init_state(narrow, low.draft, OPTIMIZER)
    for _ in range(3):
        state, report = step(state, stacked(narrow, low), batch(), None, jnp.float32(1e-5))
    assert jnp.isfinite(report.gradient_norm)
    assert {value.dtype for value in state.masters.values()} == {jnp.dtype(jnp.float32)}
    name = "layers.0.mlp.up_proj.kernel"
    moved = np.abs(np.asarray(state.masters[name]) - np.asarray(low.draft[name], np.float32))
    assert 1e-6 < np.median(moved) < 4e-5


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 2)])
def test_muon_moves_matrices_by_what_their_shape_and_the_rate_say(mesh) -> None:
    """An RMS of 0.2 of the rate, times 0.7 to 1.2, what Newton-Schulz leaves of singular values;
    less where a gradient has few of them that are not 0."""
    pair, params = pair_on(*mesh)
    optimizer = dataclasses.replace(OPTIMIZER, kind="muon")
    step = make_step(pair, OBJECTIVE, optimizer)
    rows = jax.device_put(batch(), rows_placement(pair))
    state = init_state(pair, params.draft, optimizer)
    masters = step(state, stacked(pair, params), rows, None, RATE)[0].masters
    sizes = [
        np.sqrt(np.square(np.asarray(masters[name]) - np.asarray(value)).mean()) / float(RATE)
        for name, value in params.draft.items()
        if value.ndim == 2
    ]
    assert max(sizes) < 0.25 and np.median(sizes) > 0.1, sizes


def test_a_smaller_rate_and_weight_decay_do_what_they_say() -> None:
    """AdamW: decay pulls by rate * weight_decay * weight, and is not scaled by the moments."""
    pair, params = pair_on()
    states, target = [], stacked(pair, params)
    for decay in (0.0, 0.5):
        optimizer = dataclasses.replace(OPTIMIZER, weight_decay=decay)
        step = make_step(pair, OBJECTIVE, optimizer)
        state = init_state(pair, params.draft, optimizer)
        states.append(step(state, target, batch(), None, jnp.float32(1e-3))[0].masters)
    for name, value in params.draft.items():
        pulled = np.asarray(states[0][name]) - np.asarray(states[1][name])
        np.testing.assert_allclose(pulled, 1e-3 * 0.5 * np.asarray(value), atol=2e-6)


def test_validation_draws_the_same_anchors_every_time() -> None:
    pair, params = pair_on()
    validate = partial(make_validation(pair, OBJECTIVE), params.draft, stacked(pair, params))
    assert jax.tree.all(
        jax.tree.map(lambda a, b: (a == b).all(), validate(batch(), None), validate(batch(), None))
    )


def test_the_stacked_target_is_the_target() -> None:
    """Taps in order, the last layer's among them; a tied head and an untied one."""
    for tied in (True, False):
        pair, params = tiny_pair(
            target={"tie_word_embeddings": tied}, sharding=training_sharding(1, 2, 2)
        )
        rows = jax.device_put(batch(), rows_placement(pair))

        @jax.jit
        def both(target_params, stack, rows):
            outputs = []
            for target in (pair.target.bind(target_params), FrozenTarget.of(pair).bind(stack)):  # noqa: B023
                output = target_output(target, rows, (0, 2))
                outputs.append((*output, target.logits(output.hidden)))
            return outputs

        whole, scanned = both(params.target, stacked(pair, params), rows)
        for expected, got in zip(whole, scanned, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
