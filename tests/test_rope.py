"""RoPE: rotation against complex numbers, frequencies against transformers'."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.config import RopeConfig
from dflash_jax.rope import rope_frequencies
from pallas_kernels import apply_rope


@given(st.lists(st.integers(0, 2**17), min_size=2, max_size=2), st.integers(0, 2**16))
def test_rotation_is_a_complex_product(positions: list[int], seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((1, 2, 3, 10), np.float32)
    frequencies = np.array([1.0, 0.02, 3e-4], np.float32)
    at = np.array([positions], np.int32)
    got = apply_rope(jnp.asarray(x), jnp.asarray(at), jnp.asarray(frequencies), 1.5)
    # The angle is a float32 product, as everywhere: position 2**17 leaves 1e-2 of a radian.
    angle = (at.astype(np.float32)[:, :, None, None] * frequencies).astype(np.float64)
    turned = (x[..., :3] + 1j * x[..., 3:6]) * np.exp(1j * angle) * 1.5
    expected = np.concatenate([turned.real, turned.imag, x[..., 6:]], axis=-1)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 8), np.float32)
    frequencies = jnp.asarray(rope_frequencies(RopeConfig(theta=100.0), 8)[0])

    def score(at: int, of: int) -> float:
        turned = [
            apply_rope(jnp.asarray(x), jnp.array([[p]]), frequencies) for x, p in ((q, at), (k, of))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert abs(score(5, 2) - score(5, 3)) > 1e-2


def test_bfloat16_is_rotated_in_float32() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 1, 4)), jnp.bfloat16)
    at, frequencies = jnp.array([[1001]]), jnp.array([1.0, 0.37])
    got = apply_rope(x, at, frequencies)
    wide = apply_rope(x.astype(jnp.float32), at, frequencies)
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))


SCALINGS = {
    "default": RopeConfig(theta=1e6),
    "linear": RopeConfig(theta=1e4, kind="linear", factor=4.0),
    "llama3": RopeConfig(
        theta=5e5,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=128,
    ),
    "yarn": RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=4096),
    "yarn, no truncation": RopeConfig(
        theta=1e6,
        kind="yarn",
        factor=4.0,
        original_max_position_embeddings=4096,
        truncate=False,
        beta_fast=16.0,
        beta_slow=2.0,
    ),
    "yarn, mscale": RopeConfig(
        theta=1e4,
        kind="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale=1.0,
        mscale_all_dim=0.7,
    ),
    "yarn, attention factor": RopeConfig(
        theta=1e4,
        kind="yarn",
        factor=2.0,
        original_max_position_embeddings=256,
        attention_factor=1.25,
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_are_transformers(name: str, head_dim: int) -> None:
    """Fault 19: theta and scaling come from the config, for every kind that we accept."""
    pytest.importorskip("torch", reason="the oracle is transformers' torch code: extra `parity`")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = SCALINGS[name]
    parameters = {k: v for k, v in dataclasses.asdict(rope).items() if v is not None}
    parameters["rope_type"] = parameters.pop("kind")
    parameters["rope_theta"] = parameters.pop("theta")
    used = {
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        "yarn": (
            "factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "attention_factor",
            "truncate",
            "original_max_position_embeddings",
        ),
    }.get(rope.kind, ())
    kept = {k: v for k, v in parameters.items() if k in ("rope_type", "rope_theta", *used)}
    original = rope.original_max_position_embeddings or 512
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=int(original * rope.factor),
        rope_parameters=kept,
    )
    got, factor = rope_frequencies(rope, head_dim)
    if rope.kind == "default":  # transformers keeps the unscaled case in its models
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        expected, expected_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[rope.kind](config, device="cpu")
    np.testing.assert_allclose(got, expected.numpy(), rtol=2e-6)
    assert factor == pytest.approx(expected_factor)
