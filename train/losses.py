"""What is learnt from a block: weights over its slots, cross-entropy or KL, acceptance.

Sources: the DFlash paper (arXiv 2602.06036) for the decayed cross-entropy; D-PACE (arXiv
2605.18810) for weights that follow what decoding would accept. Letters: Z rows, A blocks a row,
b slots a block.
"""

import dataclasses
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from train.stacked import Target

Weighting = Literal["decay", "d-pace"]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """``weighting``: exp(-(k-1) / gamma) over slot k, or D-PACE with smoothing ``alpha``.
    ``kl``: share of the loss that is the forward KL to the target's distribution (temperature 1)
    instead of the cross-entropy of its token. ``slice_blocks``: blocks a row whose logits exist
    at a time."""

    weighting: Weighting = "decay"
    gamma: float = 7.0
    alpha: float = 0.5
    kl: float = 0.0
    slice_blocks: int = 64

    def __post_init__(self):
        accepted = {
            "weighting": (self.weighting in ("decay", "d-pace"), "decay or d-pace"),
            "gamma": (self.gamma > 0, "more than 0"),
            "alpha": (0 <= self.alpha <= 1, "in [0, 1]"),
            "kl": (0 <= self.kl <= 1, "in [0, 1]"),
            "slice_blocks": (self.slice_blocks >= 1, "at least 1"),
        }
        for name, (fits, what) in accepted.items():
            if not fits:
                raise ValueError(f"loss.{name} must be {what}, got {getattr(self, name)!r}")


class Metrics(NamedTuple):
    """Sums over blocks, so that any split of a batch adds up to the same numbers; the loss is
    weighted_loss / weight. ``accepted``: drafts before the first miss, teacher-forced."""

    weighted_loss: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, "b-1"]
    labelled: Float[Array, "b-1"]
    accepted: Float[Array, ""]
    blocks: Float[Array, ""]


class Labels(NamedTuple):
    """What slots 1..b-1 of every block are to predict; ``mask`` is false where nothing is learnt.
    ``teacher``: the target's final hidden states at the positions before, where KL needs them."""

    tokens: Int[Array, "Z A b-1"]
    mask: Bool[Array, "Z A b-1"]
    teacher: Float[Array, "Z A b-1 D"] | None


def block_loss(
    target: Target, hidden: Float[Array, "Z A b-1 D"], labels: Labels, config: LossConfig
) -> Metrics:
    """Loss and acceptance of final draft states, read by the target's head a slice at a time.

    Differentiable in ``hidden`` alone, through ``weighted_loss`` alone. A slice's gradient is
    taken while its logits are there: the head runs once forward and once backward, and logits of
    one slice are all that ever exists.
    """

    @jax.custom_vjp
    def loss(hidden):
        def one_slice(hidden, labels):
            return _slice_loss(target, hidden, labels, config)[0], None

        return _by_slices(one_slice, hidden, labels, config.slice_blocks)[0]

    def forward(hidden):
        def one_slice(hidden, labels):
            metrics, gradient = _slice_loss(target, hidden, labels, config)
            return metrics, target.hidden_gradient(gradient).astype(hidden.dtype)

        return _by_slices(one_slice, hidden, labels, config.slice_blocks)

    def backward(gradient, cotangents: Metrics):
        return (gradient * cotangents.weighted_loss.astype(gradient.dtype),)

    loss.defvjp(forward, backward)
    return cast(Metrics, loss(hidden))


def slot_weights(
    log_probability: Float[Array, "Z A b-1"], mask: Bool[Array, "Z A b-1"], config: LossConfig
) -> Float[Array, "Z A b-1"]:
    """What each slot counts for. ``log_probability``: the draft's, of the labels.

    D-PACE's w_j is the expected number of acceptances from slot j on, were the draft sampled: the
    sum over m >= j of the product of s_i up to m, s = (1 - alpha) q + alpha. A slot without a
    label ends its block. No gradient passes through it.
    """
    if config.weighting == "decay":
        slot = jnp.arange(mask.shape[-1], dtype=jnp.float32)
        return jnp.where(mask, jnp.exp(-slot / config.gamma)[None, None, :], 0.0)
    probability = jnp.exp(jax.lax.stop_gradient(log_probability))
    smoothed = jnp.where(mask, (1 - config.alpha) * probability + config.alpha, 0.0)
    reached = jnp.cumprod(smoothed, axis=-1)
    return jnp.where(mask, jnp.cumsum(reached[..., ::-1], axis=-1)[..., ::-1], 0.0)


def _slice_loss(
    target: Target, hidden: Float[Array, "Z A b-1 D"], labels: Labels, config: LossConfig
) -> tuple[Metrics, Float[Array, "Z A b-1 V"]]:
    """(sums, gradient of weighted_loss by the logits)."""
    logits = target.logits(hidden)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, labels.tokens[..., None], axis=-1)[..., 0]
    loss = log_sum - picked
    weights = slot_weights(-loss, labels.mask, config)
    vocabulary = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    wanted = (vocabulary[None, None, None, :] == labels.tokens[..., None]).astype(jnp.float32)
    if config.kl:
        if labels.teacher is None:
            raise ValueError("the KL share of the loss needs the target's final hidden states")
        taught = jax.nn.log_softmax(target.logits(labels.teacher), axis=-1)
        probability = jnp.exp(taught)
        divergence = (probability * (taught - logits)).sum(-1) + log_sum
        loss = (1 - config.kl) * loss + config.kl * divergence
        wanted = (1 - config.kl) * wanted + config.kl * probability
    gradient = weights[..., None] * (jnp.exp(logits - log_sum[..., None]) - wanted)
    correct = ((jnp.argmax(logits, axis=-1) == labels.tokens) & labels.mask).astype(jnp.float32)
    metrics = Metrics(
        weighted_loss=(loss * weights).sum(),
        weight=weights.sum(),
        correct=correct.sum((0, 1)),
        labelled=labels.mask.astype(jnp.float32).sum((0, 1)),
        accepted=jnp.cumprod(correct, axis=-1).sum(),
        blocks=labels.mask[..., 0].astype(jnp.float32).sum(),
    )
    return metrics, gradient


def _by_slices(one_slice, hidden, labels: Labels, size: int):
    """(metrics summed, the other result joined) of ``one_slice(hidden, labels)`` over ``size``
    blocks a row at a time; blocks that fill up the last slice have no labels."""
    blocks = hidden.shape[1]
    size = min(size, blocks)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -blocks % size)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)

    def join(x: Array) -> Array:
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :blocks]

    operands = jax.tree.map(cut, (hidden, labels))
    if blocks == size:
        metrics, rest = jax.tree.map(
            lambda x: x[None], one_slice(*jax.tree.map(lambda x: x[0], operands))
        )
    else:
        metrics, rest = jax.lax.map(lambda part: one_slice(*part), operands)
    return jax.tree.map(lambda x: x.sum(0), metrics), jax.tree.map(join, rest)
