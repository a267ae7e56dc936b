"""Where a draft starts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoder import Pair, PairParams
from dflash_jax.sharding import Sharding, make_mesh
from dflash_jax.testing import tiny_pair
from train.initial import draft_from_target, random_draft


@pytest.fixture(scope="module")
def pair() -> tuple[Pair, PairParams]:
    """Target layers 0..3, taps after 0 and 2, draft layers from 2 and 3."""
    pair, params = tiny_pair(
        target={"num_layers": 4},
        draft={"target_layer_ids": (0, 2)},
        sharding=Sharding(make_mesh(2, 2)),
    )
    random = np.random.default_rng(0)
    norms = {  # ones in a fresh pair
        name: jnp.asarray(random.uniform(0.5, 2, value.shape), jnp.float32)
        for name, value in params.target.items()
        if "norm" in name
    }
    return pair, dataclasses.replace(params, target={**params.target, **norms})


def test_random_draft_ends_in_the_targets_norm(pair) -> None:
    pair, params = pair
    draft = random_draft(pair, params.target, seed=3)
    assert {n: v.shape for n, v in draft.items()} == {n: v.shape for n, v in params.draft.items()}
    fresh = pair.draft.init(3, pair.sharding)
    for name, value in draft.items():
        expected = params.target["model.norm.weight"] if name == "norm.weight" else fresh[name]
        np.testing.assert_array_equal(value, expected)


def test_layers_are_the_targets_last(pair) -> None:
    pair, params = pair
    draft = draft_from_target(pair, params.target, seed=0)
    assert draft.keys() == params.draft.keys()
    copied = [name for name in draft if name.startswith("layers.")]
    assert len(copied) == 2 * 11
    for name in copied:
        _, layer, rest = name.split(".", 2)
        source = params.target[f"model.layers.{int(layer) + 2}.{rest}"]
        np.testing.assert_array_equal(draft[name], source)
    np.testing.assert_array_equal(draft["norm.weight"], params.target["model.norm.weight"])


def test_the_context_is_the_last_tap_as_the_next_layer_would_norm_it(pair) -> None:
    pair, params = pair
    draft = draft_from_target(pair, params.target, seed=0)
    features = jax.random.normal(jax.random.key(0), (1, 5, 2 * 24), jnp.float32) * 3

    @jax.jit
    def contexts(draft, target, features):
        next_layer = pair.target.bind(target).model.layers[3]
        return pair.draft.bind(draft).context(features), next_layer.input_layernorm(
            features[..., 24:]
        )

    got, expected = contexts(draft, params.target, features)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_what_the_target_lacks_starts_neutral() -> None:
    """A Llama target has no q/k norms; a tap of the last layer has no layer after it."""
    pair, params = tiny_pair(
        target={"architecture": "llama", "qk_norm": False}, draft={"target_layer_ids": (2,)}
    )
    draft = draft_from_target(pair, params.target, seed=0)
    np.testing.assert_array_equal(draft["layers.0.self_attn.q_norm.weight"], np.ones(8))
    norm = params.target["model.layers.2.input_layernorm.weight"]
    np.testing.assert_array_equal(draft["hidden_norm.weight"], norm)


def test_a_tap_that_a_layer_reads_comes_before_one_that_none_does() -> None:
    """Taps after layers 0 and 2 of three: the last layer reads what comes after layer 1."""
    pair, params = tiny_pair()
    draft = draft_from_target(pair, params.target, seed=0)
    fc = np.zeros((48, 24), np.float32)
    fc[:24] = np.eye(24)
    np.testing.assert_array_equal(draft["fc.kernel"], fc)
    norm = params.target["model.layers.1.input_layernorm.weight"]
    np.testing.assert_array_equal(draft["hidden_norm.weight"], norm)


def test_other_shapes_are_refused_by_name() -> None:
    pair, params = tiny_pair(draft={"intermediate_size": 48})
    with pytest.raises(ValueError, match=r"layers.0.mlp.\w+.kernel .*48.* cannot start as model.l"):
        draft_from_target(pair, params.target, seed=0)
