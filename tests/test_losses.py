"""The loss of a block's slots, against the formulas written out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.models import DenseTarget
from train.losses import Labels, LossConfig, block_loss, slot_weights

D, V = 6, 11
TARGET = TargetConfig(
    vocab_size=V, hidden_size=D, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=4, rms_norm_eps=1e-6, rope=RopeConfig(1e4), max_position_embeddings=8,
    architecture="qwen3", tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def target(request) -> DenseTarget:
    config = dataclasses.replace(TARGET, tie_word_embeddings=request.param)
    return DenseTarget(config, rngs=nnx.Rngs(0))


def case(seed: int = 0, slots: int = 4) -> tuple[jax.Array, Labels]:
    random = np.random.default_rng(seed)
    hidden = 8 * random.standard_normal((2, 5, slots, D)).astype(np.float32)
    tokens = random.integers(0, V, (2, 5, slots), np.int32)
    mask = random.random((2, 5, slots)) < 0.8
    teacher = 8 * random.standard_normal((2, 5, slots, D)).astype(np.float32)
    return jnp.asarray(hidden), Labels(*map(jnp.asarray, (tokens, mask, teacher)))


@pytest.mark.parametrize("kl", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("slice_blocks", [2, 64])
def test_loss_and_gradient_are_those_of_autodiff(target, kl: float, slice_blocks: int) -> None:
    """The gradient taken within a slice is what differentiating the formula gives."""
    hidden, labels = case()
    config = LossConfig(gamma=2.0, kl=kl, slice_blocks=slice_blocks)

    def formula(hidden):
        log_q = jax.nn.log_softmax(target.logits(hidden))
        log_p = jax.nn.log_softmax(target.logits(labels.teacher))
        entropy = -jnp.take_along_axis(log_q, labels.tokens[..., None], -1)[..., 0]
        divergence = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
        weights = labels.mask.astype(jnp.float32) * jnp.exp(-jnp.arange(4.0) / 2.0)[None, None]
        return (weights * ((1 - kl) * entropy + kl * divergence)).sum(), weights.sum()

    (expected, weight), gradient = jax.value_and_grad(formula, has_aux=True)(hidden)
    metrics = block_loss(target, hidden, labels, config)
    np.testing.assert_allclose(metrics.weighted_loss, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics.weight, weight, rtol=1e-6)
    got = jax.grad(lambda h: 3 * block_loss(target, h, labels, config).weighted_loss)(hidden)
    np.testing.assert_allclose(got, 3 * gradient, rtol=1e-4, atol=1e-6)


def test_acceptance_stops_at_the_first_miss(target) -> None:
    """Fault 45: accuracy counts every slot, acceptance only what decoding would keep."""
    hidden, labels = case()
    best = jnp.argmax(target.logits(hidden), -1)
    hits = jnp.asarray([[1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]], bool)
    tokens = jnp.where(hits[None], best, (best + 1) % V)
    mask = jnp.ones_like(labels.mask).at[1, 3, 2:].set(False).at[0, 4].set(False)
    metrics = block_loss(target, hidden, Labels(tokens, mask, None), LossConfig())
    assert float(metrics.accepted) == (1 + 2 + 0 + 4) + (1 + 2 + 0 + 2 + 3)
    assert float(metrics.blocks) == 9
    np.testing.assert_array_equal(metrics.labelled, [9, 9, 8, 8])
    np.testing.assert_array_equal(metrics.correct, [7, 7, 6, 7])


def test_slot_weights() -> None:
    mask = jnp.asarray([[[True, True, True], [True, True, False]]])
    q = np.asarray([[[0.5, 0.25, 1.0], [0.1, 0.9, 0.7]]], np.float32)
    decay = slot_weights(jnp.log(q), mask, LossConfig(gamma=2.0))
    e = np.exp(-0.5)
    np.testing.assert_allclose(decay, [[[1, e, e * e], [1, e, 0]]], rtol=1e-6)
    pace = slot_weights(jnp.log(q), mask, LossConfig(weighting="d-pace", alpha=0.5))
    s = 0.5 * q[0] + 0.5
    a, b, c = s[0, 0], s[0, 0] * s[0, 1], s[0, 0] * s[0, 1] * s[0, 2]
    d, f = s[1, 0], s[1, 0] * s[1, 1]
    np.testing.assert_allclose(pace, [[[a + b + c, b + c, c], [d + f, f, 0]]], rtol=1e-6)
    slope = jax.grad(lambda x: slot_weights(x, mask, LossConfig(weighting="d-pace")).sum())
    assert not slope(jnp.log(q)).any()


def test_kl_without_a_teacher_and_bad_settings_are_refused(target) -> None:
    hidden, labels = case()
    with pytest.raises(ValueError, match="KL share of the loss needs"):
        block_loss(target, hidden, labels._replace(teacher=None), LossConfig(kl=0.5))
    for field, value, what in [
        ("weighting", "dpace", "decay or d-pace"), ("gamma", 0.0, "more than 0"),
        ("alpha", 1.5, r"in \[0, 1\]"), ("kl", -0.1, r"in \[0, 1\]"),
        ("slice_blocks", 0, "at least 1"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"loss.{field} must be {what}, got"):
            LossConfig(**{field: value})


def test_logits_of_all_blocks_never_exist() -> None:
    """Nothing of [blocks, V] in float32 is held, forward and backward."""
    blocks, vocabulary = 256, 4096
    config = dataclasses.replace(TARGET, vocab_size=vocabulary)
    target = DenseTarget(config, rngs=nnx.Rngs(0))
    hidden = jax.ShapeDtypeStruct((1, blocks, 3, D), jnp.float32)
    tokens = jax.ShapeDtypeStruct((1, blocks, 3), jnp.int32)

    def loss(hidden, tokens):
        labels = Labels(tokens, jnp.ones(tokens.shape, bool), None)
        return block_loss(target, hidden, labels, LossConfig(slice_blocks=16)).weighted_loss

    memory = jax.jit(jax.grad(loss)).lower(hidden, tokens).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.3 * blocks * 3 * vocabulary * 4
