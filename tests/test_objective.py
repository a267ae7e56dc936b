"""The training objective against inference, brute force, and what must not leak."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import Batch
from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig
from dflash_jax.decoder import Pair, PairParams, draft_pass
from dflash_jax.sampling import SamplingRows
from dflash_jax.sharding import Sharding, make_mesh
from dflash_jax.speculative import prefill_step
from train.attention import Tiles
from train.losses import LossConfig, Metrics
from train.objective import (
    ObjectiveConfig,
    blocks_at,
    draft_blocks,
    objective,
    sample_anchors,
    target_output,
)
from train.rows import PackedRows
from train.stacked import StackedDraft

BLOCK, LENGTH = 4, 24
SHAPE = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(1e4),
    "max_position_embeddings": 64,
}
TARGET = TargetConfig(
    **SHAPE, num_layers=4, architecture="qwen3", tie_word_embeddings=True, qk_norm=True
)


def draft_config(windows, causal) -> DraftConfig:
    return DraftConfig(
        **SHAPE,
        num_layers=2,
        block_size=BLOCK,
        mask_token_id=30,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        target_hidden_size=16,
        windows=windows,
        causal=causal,
    )


VARIANTS = {
    "full": draft_config((None, None), (False, False)),
    "sliding": draft_config((3, None), (True, False)),
    "bidirectional-sliding": draft_config((2, 5), (False, False)),
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request) -> tuple[Pair, PairParams]:
    return pair_of(request.param)


@pytest.fixture(scope="module")
def sliding() -> tuple[Pair, PairParams]:
    return pair_of("sliding")


def pair_of(variant: str) -> tuple[Pair, PairParams]:
    pair = Pair.of(TARGET, VARIANTS[variant], Sharding(make_mesh()), jnp.dtype("float32"))
    params = pair.init(3)
    # Larger weights than init's, so that a wrong mask shows.
    grow = {n: v * 8 if n.endswith("kernel") else v for n, v in params.draft.items()}
    return pair, PairParams(params.target, grow)


def packed(*documents: int, seed: int = 0, padding: int = 0) -> PackedRows:
    random = np.random.default_rng(seed)
    segments = np.repeat(np.arange(1, len(documents) + 1), documents)
    segments = np.pad(segments, (0, padding)).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*documents, padding)]).astype(np.int32)
    tokens = random.integers(0, 30, segments.shape, np.int32)
    as_row = lambda x: jnp.asarray(x)[None]  # noqa: E731
    return PackedRows(*map(as_row, (tokens, segments, positions, segments > 0)))


@partial(jax.jit, static_argnums=0)
def logits_at(pair, params, rows, anchors):
    draft, target = StackedDraft.of(pair).bind(params.draft), pair.target.bind(params.target)
    context = draft.context(target_output(target, rows, pair.taps).features)
    blocks = blocks_at(rows, anchors, jnp.ones_like(anchors, bool), BLOCK)
    config = ObjectiveConfig(anchors.shape[1], tiles=Tiles(6, 10))
    return target.logits(draft_blocks(draft, target, rows, context, blocks, config))[0]


def hidden_of(pair, params, rows, anchors):
    return logits_at(pair, params, rows, jnp.asarray([anchors], jnp.int32))


prefill = jax.jit(prefill_step, static_argnums=0)
first_block = jax.jit(draft_pass, static_argnums=(0, 4))


def inference_logits(pair, params, tokens, anchor):
    """The cached step's draft logits with ``tokens[:anchor]`` prefilled."""
    state = pair.new_state(slots=1, pages=8, page_size=4)
    zero = np.zeros(1, np.int32)
    sampling = SamplingRows(
        np.zeros((1, 2), np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.float32), zero,
        np.ones(1, np.float32), np.zeros(1, np.float32),
    )  # fmt: skip
    batch = Batch(zero, np.arange(1, 8, dtype=np.int32)[None], sampling)
    chunk = np.zeros((1, LENGTH), np.int32)
    chunk[0, :anchor] = tokens[:anchor]
    count, forced = np.array([anchor], np.int32), np.array([tokens[anchor]], np.int32)
    state, _ = prefill(pair, params, state, batch, chunk, zero, count, np.ones(1, bool), forced)
    return first_block(pair, params, state, batch, BLOCK)[0]


@pytest.mark.parametrize("anchor", [1, 2, 7, 15])
def test_training_block_is_the_cached_inference_step(pair, anchor):
    """Faults 45 and 49: slot k of the training block is what decoding computes at start = a."""
    pair, params = pair
    rows = packed(LENGTH)
    trained = hidden_of(pair, params, rows, [anchor])[0, 1:]
    decoded = inference_logits(pair, params, np.asarray(rows.tokens[0]), anchor)
    np.testing.assert_allclose(trained, decoded, rtol=2e-4, atol=2e-4)


def test_packing_changes_nothing(pair):
    """Fault 49: a document packed behind another gives the block it gives alone."""
    pair, params = pair
    together = packed(9, LENGTH - 9, seed=5)
    alone = jax.tree.map(lambda x: x[:, 9:], together)
    behind = hidden_of(pair, params, together, [9 + 6])
    np.testing.assert_allclose(behind, hidden_of(pair, params, alone, [6]), rtol=2e-4, atol=2e-4)


def test_blocks_never_see_each_other_or_what_follows(pair):
    """Fault 46 and leakage: anchors closer than b do not interact, and x[a+1..] do not move block
    a."""
    pair, params = pair
    rows = packed(LENGTH)
    both = hidden_of(pair, params, rows, [8, 10])
    np.testing.assert_allclose(both[0], hidden_of(pair, params, rows, [8])[0], rtol=1e-5, atol=1e-5)
    tokens = rows.tokens.at[0, 9:].set(29 - rows.tokens[0, 9:])
    changed = dataclasses.replace(rows, tokens=tokens)
    np.testing.assert_allclose(
        both[0], hidden_of(pair, params, changed, [8])[0], rtol=1e-5, atol=1e-5
    )


def test_a_block_sees_features_strictly_before_its_anchor(sliding):
    """The anchor's own feature does not exist at inference; the one before it does."""
    pair, params = sliding
    rows, anchors = packed(LENGTH), jnp.asarray([[8]], jnp.int32)

    @jax.jit
    def logits(features):
        draft = StackedDraft.of(pair).bind(params.draft)
        target = pair.target.bind(params.target)
        blocks = blocks_at(rows, anchors, jnp.ones_like(anchors, bool), BLOCK)
        context = draft.context(features)
        return draft_blocks(draft, target, rows, context, blocks, ObjectiveConfig(1))

    features = jax.random.normal(jax.random.key(0), (1, LENGTH, 32))
    before = logits(features)
    np.testing.assert_array_equal(logits(features.at[:, 8:].add(3.0)), before)
    assert float(jnp.abs(logits(features.at[:, 7].add(3.0)) - before).max()) > 1e-2


def test_labels_stay_in_their_document_and_row():
    rows = packed(6, 8, padding=4)
    anchors = jnp.asarray([[4, 5, 12, 17]], jnp.int32)
    keep = jnp.asarray([[True, True, True, False]])
    blocks = blocks_at(rows, anchors, keep, BLOCK)
    assert blocks.label_mask[0].tolist() == [
        [False, True, False, False],
        [False, False, False, False],
        [False, True, False, False],
        [False, False, False, False],
    ]
    assert blocks.labels[0, 0, 1] == rows.tokens[0, 5]


def keys_of(seed: int, rows: int = 1):
    return jax.random.split(jax.random.key(seed), rows)


def test_anchors_need_two_supervised_tokens_of_one_document():
    rows = packed(6, 8, padding=4)
    mask = rows.loss_mask.at[0, 9].set(False)
    rows = dataclasses.replace(rows, loss_mask=mask)
    anchors, keep = sample_anchors(keys_of(0), rows, 18)
    assert anchors[0][keep[0]].tolist() == [0, 1, 2, 3, 4, 6, 7, 10, 11, 12]
    assert keep[0].tolist() == [True] * 10 + [False] * 8


def test_anchors_are_uniform_and_shared_out_by_document():
    """Documents of 3, 5, 9 and 7 tokens have 2, 4, 8 and 6 candidates: of 5 anchors, each gets
    its share to within one, and every candidate is as likely as any other."""
    documents = [2, 4, 8, 6]
    rows = packed(*(n + 1 for n in documents))
    draws = 2000
    many = jax.tree.map(lambda x: jnp.repeat(x, draws, axis=0), rows)
    anchors, keep = sample_anchors(keys_of(1, draws), many, 5)
    assert keep.all()
    assert (jnp.diff(anchors, axis=1) > 0).all()  # in order, none twice
    segments = np.asarray(rows.segments)[0][np.asarray(anchors)]
    for number, candidates in enumerate(documents, start=1):
        share = (segments == number).sum(1)
        exact = 5 * candidates / sum(documents)
        # Systematic sampling per document, cut where the row has its 5: within one of the share,
        # and one more where several documents round the same way.
        assert (np.abs(share - exact) < 2).all(), number
        assert abs(share.mean() - exact) < 0.06
    counts = np.bincount(np.asarray(anchors).ravel(), minlength=LENGTH)
    candidates = counts[counts > 0]
    assert len(candidates) == 20
    assert np.abs(candidates / draws - 0.25).max() < 0.05


def test_a_row_draws_the_same_anchors_in_any_batch():
    rows = jax.tree.map(
        lambda *x: jnp.concatenate(x), packed(LENGTH), packed(10, 10, padding=4, seed=1)
    )
    keys = keys_of(3, 2)
    both = sample_anchors(keys, rows, 6)
    second = sample_anchors(keys[1:], jax.tree.map(lambda x: x[1:], rows), 6)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a[1:] == b).all(), both, second))


CONFIGS = {
    "decay": LossConfig(gamma=3.0, slice_blocks=8),
    "d-pace": LossConfig(weighting="d-pace", slice_blocks=8),
    "kl": LossConfig(gamma=3.0, kl=0.7, slice_blocks=8),
}


@pytest.mark.parametrize("loss", CONFIGS)
def test_loss_and_gradient_are_the_same_however_they_are_cut(sliding, loss: str):
    """Fault 47: slices of the vocabulary head, tiles of attention, layers computed twice and a
    batch in halves change neither the sums nor the gradient."""
    pair, params = sliding
    rows = jax.tree.map(
        lambda *x: jnp.concatenate(x), packed(LENGTH), packed(10, 10, padding=4, seed=1)
    )
    keys = keys_of(1, 2)

    @partial(jax.jit, static_argnums=0)
    def sums(config, draft_params, rows, keys):
        def loss(draft_params):
            draft, target = (
                StackedDraft.of(pair).bind(draft_params),
                pair.target.bind(params.target),
            )
            output = target_output(target, rows, pair.taps, config.tiles)
            metrics = objective(draft, target, rows, output, keys, config)
            return metrics.weighted_loss, metrics

        return jax.value_and_grad(loss, has_aux=True)(draft_params)

    whole = ObjectiveConfig(8, CONFIGS[loss])
    (_, expected), gradient = sums(whole, dict(params.draft), rows, keys)
    assert float(expected.weight) > 0
    cut = ObjectiveConfig(
        8, dataclasses.replace(CONFIGS[loss], slice_blocks=3), remat=True, tiles=Tiles(7, 5)
    )
    (_, metrics), in_parts = sums(cut, dict(params.draft), rows, keys)
    halves = [
        sums(whole, dict(params.draft), jax.tree.map(lambda x, at=at: x[at], rows), keys[at])
        for at in (slice(1), slice(1, 2))
    ]
    added = jax.tree.map(lambda a, b: a + b, halves[0][0][1], halves[1][0][1])
    for name in Metrics._fields:
        np.testing.assert_allclose(getattr(metrics, name), getattr(expected, name), rtol=3e-5)
        np.testing.assert_allclose(getattr(added, name), getattr(expected, name), rtol=3e-5)
    for name, value in gradient.items():
        scale = float(jnp.abs(value).max()) + 1e-6
        np.testing.assert_allclose(in_parts[name], value, rtol=1e-4, atol=3e-5 * scale)
        both = halves[0][1][name] + halves[1][1][name]
        np.testing.assert_allclose(both, value, rtol=1e-4, atol=3e-5 * scale)


def test_dropped_blocks_are_finite_and_have_no_gradient(sliding):
    """A row with two anchors gives the same gradient whether two or six are asked for."""
    pair, params = sliding
    rows = packed(3, padding=LENGTH - 3)

    def gradient(anchors: int):
        @jax.jit
        @jax.value_and_grad
        def loss(draft_params):
            target = pair.target.bind(params.target)
            config = ObjectiveConfig(anchors, LossConfig(gamma=3.0, slice_blocks=2))
            draft = StackedDraft.of(pair).bind(draft_params)
            output = target_output(target, rows, pair.taps)
            metrics = objective(draft, target, rows, output, keys_of(0), config)
            return metrics.weighted_loss

        return loss(dict(params.draft))

    (value, few), (other, many) = gradient(2), gradient(6)
    assert float(value) > 0
    np.testing.assert_allclose(other, value, rtol=1e-5)
    for name, expected in few.items():
        np.testing.assert_allclose(many[name], expected, rtol=1e-4, atol=1e-5)
