"""Next-token training on a text that can be learnt: counting modulo 7."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoder import Pair
from dflash_jax.sharding import Sharding, make_mesh
from dflash_jax.testing import target_oracle, tiny_pair
from train.language_model import LanguageModelConfig, next_token_loss, train_language_model
from train.samples import DataError

CONFIG = LanguageModelConfig(batch_rows=4, row_length=16, learning_rate=5e-2, steps=40)
STREAM = np.arange(400, dtype=np.int32) % 7


def target_on(data: int = 1, model: int = 1) -> Pair:
    pair, _ = tiny_pair(
        target={"num_layers": 1},
        draft={"target_layer_ids": (0,)},
        sharding=Sharding(make_mesh(data, model)),
    )
    return pair


def run(pair: Pair, config: LanguageModelConfig = CONFIG) -> tuple[dict, list[str]]:
    lines: list[str] = []
    params = train_language_model(pair, STREAM, config, report=lines.append)
    return {name: np.asarray(value) for name, value in params.items()}, lines


def test_it_learns_and_repeats_bit_for_bit() -> None:
    pair = target_on()
    params, lines = run(pair)
    assert len(lines) == 1 and lines[0].startswith("target: step 40 loss ")
    assert float(lines[0].split()[4]) < 1.0, "the mean of all steps, from log 40 on"
    window = jnp.asarray(STREAM[None, :17])
    assert float(next_token_loss(pair.target.bind(params), window)) < 0.1
    again, _ = run(pair)
    for name, value in params.items():
        np.testing.assert_array_equal(value, again[name])


def test_the_mesh_changes_nothing() -> None:
    config = LanguageModelConfig(batch_rows=4, row_length=16, learning_rate=1e-2, steps=2)
    alone, _ = run(target_on(), config)
    for name, value in run(target_on(2, 2), config)[0].items():
        # Orthogonalised updates magnify float32 sums of another order; a wrong gradient would
        # move weights by the rate itself.
        np.testing.assert_allclose(value, alone[name], atol=0.05 * config.learning_rate)


def test_the_loss_is_the_oracles_cross_entropy() -> None:
    pair, params = tiny_pair()
    tokens = np.random.default_rng(0).integers(0, 40, 20).tolist()
    logits, _ = target_oracle(pair, params, tokens)
    expected = np.mean(
        [np.logaddexp.reduce(row) - row[t] for row, t in zip(logits, tokens[1:], strict=False)]
    )
    loss = jax.jit(lambda p, t: next_token_loss(pair.target.bind(p), t))(
        params.target, jnp.asarray([tokens], jnp.int32)
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match="16 tokens of text fill no window of 16 \\+ 1"):
        train_language_model(target_on(), STREAM[:16], CONFIG)
