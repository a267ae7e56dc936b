"""Drawing tokens. The stream never depends on the draft: the target's token at absolute position p
is argmax over v of (filtered logit_v + Gumbel noise keyed by (seed, choice, p, v)).

One function filters, for plain and speculative decoding alike: temperature first, then top-k, top-p
and min-p on the same normalised distribution (jointly, not one after the other). Each keeps the
tokens whose logit is at least a threshold, so no vocabulary is sorted: the thresholds are found
exactly by bisection over the ordered bits of a float32. Ties at a threshold are all kept.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, UInt32

TINY = float(jnp.finfo(jnp.float32).tiny)  # CPUs and GPUs may flush what is smaller to 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """Sampling settings of B rows, one array each.

    seed: the 64-bit seed as (high, low) words. temperature 0 is greedy; top_k 0, top_p 1 and
    min_p 0 switch a filter off.
    """

    seed: UInt32[Array, "B 2"]
    choice: UInt32[Array, "B"]
    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]


def draw(
    logits: Float[Array, "B T V"], rows: SamplingRows, positions: Int[Array, "B T"]
) -> Int[Array, "B T"]:
    """The token drawn at each absolute position (the position OF the token drawn).

    Greedy rows are plain argmax, lowest id on ties, whatever their neighbours do; a batch without
    sampled rows computes neither noise nor filters.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sampled = rows.temperature > 0

    def sample(logits):
        batch, tokens, vocab = logits.shape
        temperature = jnp.where(sampled, jnp.maximum(rows.temperature, TINY), 1.0)
        # From the peak, so that the coldest division overflows for all but the best tokens.
        scaled = (logits - logits.max(-1, keepdims=True)) / temperature[:, None, None]
        needs_filter = sampled & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
        scaled = jax.lax.cond(
            needs_filter.any(), lambda x: filter_logits(x, rows), lambda x: x, scaled
        )
        noise = gumbel_noise(rows.seed, rows.choice, positions, vocab)
        drawn = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
        return jnp.where(sampled[:, None], drawn, greedy)

    return jax.lax.cond(sampled.any(), sample, lambda _: greedy, logits)


def filter_logits(scaled: Float[Array, "B T V"], rows: SamplingRows) -> Float[Array, "B T V"]:
    """Logits, already divided by temperature, with every removed token at -inf.

    top-k keeps the k largest; top-p keeps v while the mass strictly above v is below top_p; min-p
    keeps v while p_v >= min_p * p_max. A token survives if all three keep it; the largest always
    survives.
    """
    vocab = scaled.shape[-1]
    peak = scaled.max(-1, keepdims=True)
    mass = jnp.exp(scaled - peak)
    total = mass.sum(-1, keepdims=True)
    order = _ordered_bits(scaled)

    def per_row(x):
        return x[:, None, None]

    top_k = per_row(jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab))
    # Not 0, which nothing is below: the largest could not survive.
    top_p = per_row(jnp.where(rows.top_p < 1, jnp.maximum(rows.top_p, TINY), jnp.inf))

    # The k-th largest value is the largest with at least k tokens at or above it.
    at_least_k = _largest(order, lambda t: (order >= t).sum(-1, keepdims=True) >= top_k)
    mass_kept = _smallest(
        order,
        lambda t: jnp.where(order > t, mass, 0.0).sum(-1, keepdims=True) < top_p * total,
    )
    keep = (order >= at_least_k) & (order >= mass_kept)
    min_p = per_row(rows.min_p)
    keep &= (mass >= min_p) | (scaled == peak)
    return jnp.where(keep, scaled, -jnp.inf)


def gumbel_noise(
    seed: UInt32[Array, "B 2"], choice: UInt32[Array, "B"], positions: Int[Array, "B T"], vocab: int
) -> Float[Array, "B T V"]:
    """Standard Gumbel noise in float32, a function of (seed, choice, position, vocabulary id) and
    of nothing else: unchanged by padding, mesh, batch or block (threefry2x32, counted by id)."""
    ids = jnp.arange(vocab, dtype=jnp.uint32)
    counters = jnp.concatenate([jnp.zeros_like(ids), ids])

    def one(seed, choice, position):
        key = threefry_2x32(seed, jnp.stack([choice, position]))
        return threefry_2x32(key, counters)[:vocab]

    over_tokens = jax.vmap(one, in_axes=(None, None, 0))
    bits = jax.vmap(over_tokens)(seed, choice, positions.astype(jnp.uint32))
    # 23 random bits, centred: u lies in (0, 1) exclusive, so both logarithms are finite.
    uniform = ((bits >> jnp.uint32(9)).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
    return -jnp.log(-jnp.log(uniform))


def _ordered_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """float32 -> uint32 with the same order (NaN aside); -0.0 and 0.0 map to one value."""
    x = jnp.where(x == 0, 0.0, x)  # not x + 0.0, which XLA simplifies away
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> jnp.uint32(31) == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(0x80000000))


def _largest(order: UInt32[Array, "... V"], holds) -> UInt32[Array, "... 1"]:
    """The largest t for which ``holds(t)``; holds(0) is true and holds is monotone falling."""

    def bit(i, t):
        higher = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(higher), higher, t)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros_like(order[..., :1]))


def _smallest(order: UInt32[Array, "... V"], holds) -> UInt32[Array, "... 1"]:
    """The smallest t for which ``holds(t)``, holds being monotone rising."""

    def fails(t) -> Bool[Array, "... 1"]:
        return ~holds(t)

    zero = jnp.zeros_like(order[..., :1])
    below = _largest(order, fails)
    return jnp.where(holds(zero), zero, below + jnp.uint32(1))
