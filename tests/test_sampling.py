"""Drawing: the filters against a sorting oracle, the noise's independence, and the drawn law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dflash_jax.request import SamplingParams
from dflash_jax.sampling import draw, filter_logits, gumbel_noise
from dflash_jax.testing import sampling_rows

VOCAB = 24
drawn = jax.jit(draw)
filtered = jax.jit(filter_logits)


def kept_by_sorting(
    logits: np.ndarray, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Which tokens survive, all three filters on one normalised distribution, in float64."""
    wide = logits.astype(np.float64)
    p = np.exp(wide - wide.max())
    p /= p.sum()
    keep = np.ones(len(p), bool)
    if top_k > 0:
        keep &= wide >= np.sort(wide)[::-1][min(top_k, len(p)) - 1]
    if top_p < 1:
        above = np.array([p[wide > v].sum() for v in wide])
        keep &= above < top_p
    if min_p > 0:
        keep &= p >= min_p * p.max()
    return keep | (wide == wide.max())


def survivors(logits: np.ndarray, **settings) -> np.ndarray:
    rows = sampling_rows([SamplingParams(temperature=1.0, **settings)])
    return np.isfinite(filtered(jnp.asarray(logits, jnp.float32)[None, None], rows)[0, 0])


finite = st.floats(-20, 20, width=32, allow_subnormal=False)  # CPUs may flush those to 0
few_values = st.sampled_from([-3.5, -1.0, 0.0, 1.0, 2.0])  # many ties
logit_rows = st.one_of(
    st.lists(finite, min_size=VOCAB, max_size=VOCAB),
    st.lists(few_values, min_size=VOCAB, max_size=VOCAB),
)


@settings(max_examples=200)
@given(
    logit_rows,
    st.integers(0, VOCAB + 3),
    st.sampled_from([0.01, 0.2, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
@example([0.0] * VOCAB, 3, 0.5, 0.5)
def test_filters_equal_sorting(values, top_k: int, top_p: float, min_p: float) -> None:
    """Ties at a threshold are all kept, whichever filter sets it."""
    logits = np.array(values, np.float32)
    wide = np.exp(logits.astype(np.float64) - logits.max())
    p = wide / wide.sum()
    above = np.array([p[logits > v].sum() for v in logits])
    # Where float32 rounding decides at a boundary, either answer is right.
    assume(np.abs(above - top_p).min() > 1e-5 and np.abs(wide - min_p).min() > 1e-6)
    settings_ = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    np.testing.assert_array_equal(
        survivors(logits, **settings_), kept_by_sorting(logits, **settings_)
    )


def test_filters_act_jointly() -> None:
    """Fault 12: on the renormalised top-4 set top_p = .82 would keep 3 tokens, not 4."""
    p = np.array([0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03])
    assert survivors(np.log(p), top_k=4, top_p=0.82).tolist() == [True] * 4 + [False] * 5


def test_temperature_comes_first() -> None:
    """Fault 11: top_p counts the mass of the tempered distribution."""
    logits = np.log(np.array([0.6, 0.3, 0.1]))
    cold = SamplingParams(temperature=0.25, top_p=0.9)
    p = np.exp(logits / 0.25)
    assert p[0] / p.sum() > 0.9  # so at this temperature one token remains
    tokens = {
        int(drawn(jnp.asarray(logits, jnp.float32)[None, None], sampling_rows([cold]), at)[0, 0])
        for at in (jnp.array([[i]]) for i in range(200))
    }
    assert tokens == {0}


@pytest.mark.parametrize("top_p", [1e-7, 1e-38, 1e-46, 1e-300])
def test_the_smallest_top_p_keeps_the_best(top_p: float) -> None:
    """A top_p that float32 rounds to 0 is no filter that keeps everything."""
    logits = np.array([0.5, 3.0, 2.5, -1.0])
    assert survivors(logits, top_p=top_p).tolist() == [False, True, False, False]


def test_signed_zeros_tie() -> None:
    logits = np.array([0.0, -0.0, -1.0, -0.0], np.float32)
    assert survivors(logits, top_k=1).tolist() == [True, True, False, True]
    assert survivors(logits, top_p=0.1).tolist() == [True, True, False, True]


def logits_of(batch: int, tokens: int, seed: int = 0, vocab: int = VOCAB) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal((batch, tokens, vocab), np.float32)
    return jnp.asarray(2 * values)


def test_greedy_rows_are_argmax_whoever_is_beside_them() -> None:
    """Fault 10: a greedy row never takes a neighbour's temperature."""
    logits = logits_of(4, 3)
    hot = SamplingParams(temperature=50.0, seed=3)
    rows = sampling_rows([SamplingParams(), hot, SamplingParams(top_k=5, top_p=0.2), hot])
    at = jnp.broadcast_to(jnp.arange(3)[None], (4, 3))
    got = drawn(logits, rows, at)
    expected = jnp.argmax(logits, -1)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[2], expected[2])
    alone = drawn(logits[1:2], sampling_rows([hot]), at[:1])
    np.testing.assert_array_equal(got[1], alone[0])
    assert (got[1] != expected[1]).any()


def test_greedy_ties_take_the_lowest_id() -> None:
    """Fault 16."""
    logits = jnp.zeros((1, 1, VOCAB)).at[0, 0, jnp.array([5, 9, 17])].set(1.0)
    assert drawn(logits, sampling_rows([SamplingParams()]), jnp.array([[0]]))[0, 0] == 5


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-39, 1.2e-38, 1e-30, 1e-6])
def test_the_coldest_sampling_is_greedy(temperature: float) -> None:
    """No division overflows into ties: the best token wins at any temperature that rounds to 0."""
    logits = jnp.asarray([[[4.0, 8.5, 9.0, -3.0]]])
    for filters in ({}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}):
        rows = sampling_rows([SamplingParams(temperature=temperature, seed=1, **filters)])
        for position in range(20):
            assert drawn(logits, rows, jnp.array([[position]]))[0, 0] == 2


def test_the_hottest_sampling_is_uniform() -> None:
    logits = jnp.asarray([[[4.0, 9.0, -8.5, -30.0]] * 4000])
    rows = sampling_rows([SamplingParams(temperature=100.0, seed=1)])
    counts = np.bincount(drawn(logits, rows, jnp.arange(4000)[None])[0], minlength=4)
    p = np.exp(np.array([4.0, 9.0, -8.5, -30.0]) / 100)
    # Five standard deviations of a count of 4,000 draws.
    np.testing.assert_allclose(counts, 4000 * p / p.sum(), atol=5 * np.sqrt(4000 * 0.25 * 0.75))


def test_noise_is_a_function_of_seed_position_and_id_alone() -> None:
    """Fault 15: unchanged by batch, grouping of positions, vocabulary padding and jit."""
    seeds = jnp.array([[0, 1], [7, 2**31], [0, 1]], jnp.uint32)
    choice = jnp.zeros(3, jnp.uint32)
    at = jnp.array([[0, 1, 2, 500], [9, 8, 7, 6], [500, 2, 1, 0]])
    noise = gumbel_noise(seeds, choice, at, VOCAB)
    np.testing.assert_array_equal(noise[0], noise[2, ::-1])
    alone = gumbel_noise(seeds[1:2], choice[:1], at[1:2, 2:3], VOCAB + 9)
    np.testing.assert_array_equal(noise[1, 2], alone[0, 0, :VOCAB])
    jitted = jax.jit(gumbel_noise, static_argnums=3)(seeds, choice, at, VOCAB)
    # The random bits are equal; XLA may contract the two logarithms differently.
    np.testing.assert_allclose(noise, jitted, rtol=1e-6, atol=1e-6)
    assert np.isfinite(noise).all()


def test_every_part_of_the_key_matters() -> None:
    at = jnp.array([[3]])

    def noise(seed: int, choice: int, at=at):
        words = jnp.array([[seed >> 32, seed & 0xFFFFFFFF]], jnp.uint32)
        return gumbel_noise(words, jnp.array([choice], jnp.uint32), at, VOCAB)[0, 0]

    base = noise(1, 0)
    others = [noise(2, 0), noise(1 << 32, 0), noise(1, 1), noise(1, 0, at + 1)]
    for other in others:
        assert not np.isclose(base, other).any()


def test_noise_is_standard_gumbel() -> None:
    """Kolmogorov-Smirnov on 96,000 values, and no correlation between neighbours."""
    seeds, at = jnp.array([[0, 42]], jnp.uint32), jnp.arange(4000)[None]
    noise = np.asarray(gumbel_noise(seeds, jnp.zeros(1, jnp.uint32), at, VOCAB))[0]
    values = np.sort(noise.ravel().astype(np.float64))
    n = len(values)
    distance = np.abs(np.exp(-np.exp(-values)) - (np.arange(n) + 0.5) / n).max()
    assert distance < 1.95 / np.sqrt(n)  # the 0.1 % point
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):
        correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(correlation) < 4 / np.sqrt(a.size)


LAWS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.6, seed=2**40 + 5),
    SamplingParams(temperature=1.7, top_k=6, seed=3),
    SamplingParams(temperature=1.0, top_p=0.7, seed=-4),
    SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.1, seed=5),
]


@pytest.mark.parametrize("params", LAWS, ids=lambda p: f"T={p.temperature},k={p.top_k}")
def test_the_drawn_law_is_the_filtered_softmax(params: SamplingParams) -> None:
    """Fault 13, by Pearson's chi-square over 20,000 positions of one fixed distribution."""
    draws = 20_000
    logits = logits_of(1, 1, seed=8)
    scaled = np.asarray(logits[0, 0]) / np.float32(params.temperature)
    keep = kept_by_sorting(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    p = np.where(keep, np.exp(scaled.astype(np.float64)), 0.0)
    p /= p.sum()
    tokens = drawn(
        jnp.broadcast_to(logits, (1, draws, VOCAB)),
        sampling_rows([params]),
        jnp.arange(draws)[None],
    )
    counts = np.bincount(tokens[0], minlength=VOCAB)
    assert counts[~keep].sum() == 0
    expected = draws * p[keep]
    statistic = ((counts[keep] - expected) ** 2 / expected).sum()
    freedom = int(keep.sum()) - 1
    # Mean + 5 standard deviations of chi-square: passes for all but one seed in some 10**5.
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_positions_draw_independently() -> None:
    """Two neighbouring positions: the joint law is the product of the single ones."""
    draws = 20_000
    logits = jnp.broadcast_to(jnp.asarray([0.0, 0.5, 1.0])[None, None], (1, draws, 3))
    rows = sampling_rows([SamplingParams(temperature=1.0, seed=9)])
    tokens = np.asarray(drawn(logits, rows, jnp.arange(draws)[None])[0])
    p = np.exp([0.0, 0.5, 1.0]) / np.exp([0.0, 0.5, 1.0]).sum()
    counts = np.zeros((3, 3))
    np.add.at(counts, (tokens[0::2], tokens[1::2]), 1)
    expected = draws / 2 * np.outer(p, p)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 8 + 5 * np.sqrt(16)


def test_jit_and_eager_draw_alike() -> None:
    logits = logits_of(3, 4, seed=2)
    rows = sampling_rows([SamplingParams(), LAWS[1], LAWS[4]])
    at = jnp.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(drawn(logits, rows, at), draw(logits, rows, at))
