"""The DFlash training objective: random anchors, one block each, decayed cross-entropy.

Source: the DFlash paper (arXiv 2602.06036), its section on training. The draft module is the one
that decodes; only its ``attend`` differs: a block sees the context features strictly before its
anchor, its own slots, and nothing else. Letters: Z sequences (packed rows), S tokens a row,
A anchors a row, b block size.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dflash_jax.config import DraftConfig
from dflash_jax.draft import Draft
from dflash_jax.layers import Attend
from dflash_jax.models import DenseTarget
from train.rows import PackedRows


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """``anchors`` a row, redrawn every step; ``gamma`` of the decay exp(-(k-1)/gamma) over in-block
    index k; ``anchor_group``: anchors a row whose logits and attention scores exist at a time."""

    anchors: int
    gamma: float
    anchor_group: int


class Metrics(NamedTuple):
    """Sums over blocks, so that any split of a batch adds up to the same numbers."""

    weighted_loss: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, "b-1"]
    labelled: Float[Array, "b-1"]
    accepted: Float[Array, ""]
    blocks: Float[Array, ""]


class Blocks(NamedTuple):
    """Anchors and labels of a group of blocks; ``label_mask`` is false where nothing is learnt."""

    anchors: Int[Array, "Z A"]
    labels: Int[Array, "Z A b"]
    label_mask: Bool[Array, "Z A b"]


def target_features(
    target: DenseTarget, rows: PackedRows, taps: tuple[int, ...]
) -> Float[Array, "Z S nD"]:
    """The frozen target's taps over packed documents; a document never sees another."""
    same = rows.segments[:, :, None] == rows.segments[:, None, :]
    index = jnp.arange(rows.tokens.shape[1])
    visible = same & (index[:, None] >= index[None, :])[None]

    def attend(_: int, q: Array, k: Array, v: Array) -> Array:
        with jax.numpy_dtype_promotion("standard"):  # jax's own widens its logits implicitly
            return jax.nn.dot_product_attention(q, k, v, mask=visible[:, None])

    output = target(rows.tokens, rows.positions, attend, taps)
    return jax.lax.stop_gradient(output.features)


def sample_anchors(
    key: PRNGKeyArray, rows: PackedRows, count: int
) -> tuple[Int[Array, "Z A"], Bool[Array, "Z A"]]:
    """``count`` anchors a row, uniform without replacement, and which of them are real.

    p is an anchor iff p and p+1 are supervised and of one document: a block needs one label. The
    documents of a packed row share its anchors in proportion to what of them is supervised.
    """
    pairs = rows.loss_mask[:, :-1] & rows.loss_mask[:, 1:]
    pairs &= rows.segments[:, :-1] == rows.segments[:, 1:]
    valid = jnp.pad(pairs, ((0, 0), (0, 1)))
    noise = jnp.where(valid, jax.random.uniform(key, valid.shape, jnp.float32), -1.0)
    best, anchors = jax.lax.top_k(noise, count)
    return anchors.astype(jnp.int32), best >= 0


def blocks_at(
    rows: PackedRows, anchors: Int[Array, "Z A"], keep: Bool[Array, "Z A"], block_size: int
) -> Blocks:
    """Labels x[a+k] of every block; slot 0, other documents and unsupervised tokens are masked."""
    length = rows.tokens.shape[1]
    offsets = jnp.arange(block_size, dtype=jnp.int32)
    raw = anchors[:, :, None] + offsets[None, None, :]
    index = jnp.minimum(raw, length - 1)

    def take(values):
        return jax.vmap(lambda row, at: row[at])(values, index)

    same_document = take(rows.segments) == take(rows.segments)[:, :, :1]
    mask = (raw < length) & same_document & take(rows.loss_mask)
    mask &= keep[:, :, None] & (offsets > 0)[None, None, :]
    return Blocks(anchors, take(rows.tokens), mask)


def block_attend(
    config: DraftConfig,
    context_kv: tuple[tuple[Float[Array, "Z S K H"], Float[Array, "Z S K H"]], ...],
    rows: PackedRows,
    anchors: Int[Array, "Z A"],
) -> Attend:
    """The ``attend`` of training over Z*A blocks of b slots: context before the anchor (its own
    feature does not exist at inference) and the block itself, in one softmax."""
    batch, num_anchors = anchors.shape

    def at_anchor(values):
        return jnp.take_along_axis(values, anchors, axis=1)[:, :, None]

    index = jnp.arange(rows.tokens.shape[1])[None, None, :]
    before = index < anchors[:, :, None]
    before &= rows.segments[:, None, :] == at_anchor(rows.segments)  # [Z, A, S]

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        block, heads, dim = q.shape[1:]
        kv = k.shape[2]
        grouped = q.reshape(batch, num_anchors, block, kv, heads // kv, dim)
        own_k, own_v = (x.reshape(batch, num_anchors, block, kv, dim) for x in (k, v))
        context_k, context_v = context_kv[layer]
        offset = jnp.arange(block)
        # distance from query to key, in positions of the document
        to_context = (at_anchor(rows.positions) - rows.positions[:, None, :])[:, :, None, :]
        to_context = to_context + offset[None, None, :, None]  # [Z, A, b, S]
        in_block = offset[:, None] - offset[None, :]
        sees_context = jnp.broadcast_to(before[:, :, None, :], to_context.shape)
        sees_block = in_block >= 0 if config.causal[layer] else jnp.ones_like(in_block, bool)
        window = config.windows[layer]
        if window is not None:
            sees_context &= to_context < window
            sees_block &= in_block < window
        scale = jnp.float32(dim**-0.5)
        wide = {"preferred_element_type": jnp.float32}
        context = jnp.einsum("ZATKGH,ZSKH->ZKGATS", grouped, context_k, **wide) * scale
        own = jnp.einsum("ZATKGH,ZAUKH->ZKGATU", grouped, own_k, **wide) * scale
        context = jnp.where(sees_context[:, None, None], context, -jnp.inf)
        own = jnp.where(sees_block[None, None, None, None], own, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([context, own], -1), axis=-1).astype(q.dtype)
        context, own = weights[..., :-block], weights[..., -block:]
        out = jnp.einsum("ZKGATS,ZSKH->ZATKGH", context, context_v)
        out += jnp.einsum("ZKGATU,ZAUKH->ZATKGH", own, own_v)
        return out.reshape(q.shape)

    return attend


def objective(
    draft: Draft,
    target: DenseTarget,
    rows: PackedRows,
    features: Float[Array, "Z S nD"],
    key: PRNGKeyArray,
    config: ObjectiveConfig,
) -> Metrics:
    """Weighted cross-entropy sums of one batch; the loss is weighted_loss / weight.

    Anchors go through in groups under ``jax.checkpoint``: neither the [blocks, V] logits nor the
    [blocks, S] attention scores of a whole batch ever exist, forward or backward. A single group
    is kept and not computed twice.
    """
    settings = draft.config
    context_kv = draft.context_kv(draft.context(features), rows.positions)
    anchors, keep = sample_anchors(key, rows, config.anchors)
    if config.anchors % config.anchor_group:
        raise ValueError(f"anchor_group {config.anchor_group} must divide anchors {config.anchors}")
    groups = config.anchors // config.anchor_group

    def grouped(values):  # [Z, A] -> [groups, Z, group]
        return values.reshape(values.shape[0], groups, -1).swapaxes(0, 1)

    def one_group(group):
        group_anchors, group_keep = group
        blocks = blocks_at(rows, group_anchors, group_keep, settings.block_size)
        hidden = draft_blocks(draft, target, rows, context_kv, blocks)
        return score(target.logits(hidden), blocks, config.gamma)

    if groups == 1:
        return one_group((anchors, keep))
    sums = jax.lax.map(jax.checkpoint(one_group), (grouped(anchors), grouped(keep)))
    return Metrics(*(x.sum(0) for x in sums))


def draft_blocks(
    draft: Draft, target: DenseTarget, rows: PackedRows, context_kv, blocks: Blocks
) -> Float[Array, "Z A b D"]:
    """The draft's hidden states of every block [anchor, MASK, ...]."""
    settings = draft.config
    batch, num_anchors = blocks.anchors.shape
    offsets = jnp.arange(settings.block_size, dtype=jnp.int32)
    first = jnp.take_along_axis(rows.tokens, blocks.anchors, axis=1)[:, :, None]
    tokens = jnp.where((offsets == 0)[None, None], first, settings.mask_token_id)
    start = jnp.take_along_axis(rows.positions, blocks.anchors, axis=1)[:, :, None]
    positions = start + offsets[None, None, :]

    def flat(x):
        return x.reshape(batch * num_anchors, settings.block_size)

    attend = block_attend(settings, context_kv, rows, blocks.anchors)
    hidden = draft(target.embed(flat(tokens)), flat(positions), attend)
    return hidden.reshape(batch, num_anchors, settings.block_size, -1)


def score(logits: Float[Array, "Z A b V"], blocks: Blocks, gamma: float) -> Metrics:
    """Loss sums and teacher-forced acceptance of blocks, from float32 logits."""
    labels, mask = blocks.labels, blocks.label_mask
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - picked
    offsets = jnp.arange(labels.shape[-1], dtype=jnp.float32)
    decay = jnp.exp(-(offsets - 1) / gamma)
    weights = jnp.where(mask, decay[None, None, :], 0.0)
    correct = (jnp.argmax(logits, axis=-1) == labels) & mask
    prefix = jnp.cumprod(correct[..., 1:].astype(jnp.float32), axis=-1)
    real = mask[..., 1]  # a kept block has at least its first label
    return Metrics(
        weighted_loss=(loss * weights).sum(),
        weight=weights.sum(),
        correct=correct[..., 1:].astype(jnp.float32).sum((0, 1)),
        labelled=mask[..., 1:].astype(jnp.float32).sum((0, 1)),
        accepted=prefix.sum(),
        blocks=real.astype(jnp.float32).sum(),
    )
