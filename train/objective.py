"""The DFlash training objective: random anchors, one block each, and the loss over its slots.

Source: the DFlash paper (arXiv 2602.06036), its section on training. The draft module is the one
that decodes; only its ``attend`` differs (attention.py). Letters: Z sequences (packed rows), S
tokens a row, A anchors a row, b block size.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dflash_jax.models import TargetOutput
from train.attention import TILES, Forward, Tiles, block_attend, packed_attend
from train.losses import Labels, LossConfig, Metrics, block_loss
from train.rows import PackedRows
from train.stacked import BoundDraft, Target


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """``anchors`` a row, redrawn every step. ``remat``: the draft's layers are computed again in
    the backward pass. ``tiles``: of attention, the target's and the draft's."""

    anchors: int
    loss: LossConfig = LossConfig()
    remat: bool = False
    tiles: Tiles = TILES

    def __post_init__(self):
        if self.anchors < 1:
            raise ValueError(f"objective.anchors must be at least 1, got {self.anchors}")
        if min(self.tiles) < 1:
            raise ValueError(f"objective.tiles must be at least 1, got {tuple(self.tiles)}")


class Blocks(NamedTuple):
    """Anchors and labels of blocks; ``label_mask`` is false where nothing is learnt."""

    anchors: Int[Array, "Z A"]
    labels: Int[Array, "Z A b"]
    label_mask: Bool[Array, "Z A b"]


def target_output(
    target: Target,
    rows: PackedRows,
    taps: tuple[int, ...],
    tiles: Tiles = TILES,
    forward: Forward = "tiles",
) -> TargetOutput:
    """The frozen target over packed documents: its taps, and its final hidden states."""
    output = target(rows.tokens, rows.positions, packed_attend(rows, tiles, forward), taps)
    return jax.tree.map(jax.lax.stop_gradient, output)


def sample_anchors(
    keys: PRNGKeyArray, rows: PackedRows, count: int
) -> tuple[Int[Array, "Z A"], Bool[Array, "Z A"]]:
    """``count`` anchors a row in ascending order, and which of them are real (real ones first).

    ``keys`` [Z]: one a row, so that no split of a batch changes what is drawn. p is an anchor iff
    p and p+1 are supervised and of one document: a block needs one label. Without replacement,
    every such p as likely as any other; every document of a packed row gets its share to within
    two, so that none is left to chance.
    """
    length = rows.tokens.shape[1]
    pairs = rows.loss_mask[:, :-1] & rows.loss_mask[:, 1:]
    pairs &= rows.segments[:, :-1] == rows.segments[:, 1:]
    valid = jnp.pad(pairs, ((0, 0), (0, 1)))

    def one_row(key, valid, segments):
        # The r-th candidate of a document with n of them, in random order, gets (r + u) / n: the
        # smallest are spread over documents in proportion to n (systematic sampling). Ranks are
        # counted and not sorted for: a TPU's sorts take longer to compile than a layer does.
        noise, offset = jax.random.uniform(key, (2, length), jnp.float32)
        rivals = valid[None, :] & (segments[:, None] == segments[None, :])
        rank = (rivals & _before(noise)).sum(1).astype(jnp.float32)
        score = (rank + offset[segments]) / jnp.maximum(rivals.sum(1).astype(jnp.float32), 1.0)
        taken = valid & ((valid[None, :] & _before(score)).sum(1) < count)
        taken_up_to = jnp.cumsum(taken.astype(jnp.int32))
        number = jnp.arange(count, dtype=jnp.int32)
        anchors = (taken_up_to[None, :] <= number[:, None]).sum(1).astype(jnp.int32)
        return jnp.where(anchors < length, anchors, 0), anchors < length

    return jax.vmap(one_row)(keys, valid, rows.segments)


def _before(score: Float[Array, "S"]) -> Bool[Array, "S S"]:
    """[i, j]: whether j comes before i, by score and then by index. Fused into what sums it."""
    index = jnp.arange(score.shape[0], dtype=jnp.int32)
    earlier = index[None, :] < index[:, None]
    mine, other = score[:, None], score[None, :]
    return (other < mine) | ((other == mine) & earlier)


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


def objective(
    draft: BoundDraft,
    target: Target,
    rows: PackedRows,
    output: TargetOutput,
    keys: PRNGKeyArray,
    config: ObjectiveConfig,
    forward: Forward = "tiles",
) -> Metrics:
    """Loss sums of one batch; the loss is weighted_loss / weight. ``keys`` [Z]: one a row;
    ``forward``: of attention."""
    settings = draft.config
    context = draft.context(output.features)
    anchors, keep = sample_anchors(keys, rows, config.anchors)
    blocks = blocks_at(rows, anchors, keep, settings.block_size)
    hidden = draft_blocks(draft, target, rows, context, blocks, config, forward)
    teacher = None
    if config.loss.kl:
        # The target's draw for position a + k is made at a + k - 1.
        offsets = jnp.arange(settings.block_size - 1, dtype=jnp.int32)
        before = anchors[:, :, None] + offsets[None, None, :]
        before = jnp.minimum(before, rows.tokens.shape[1] - 1)
        teacher = jax.vmap(lambda row, at: row[at])(output.hidden, before)
    labels = Labels(blocks.labels[..., 1:], blocks.label_mask[..., 1:], teacher)
    return block_loss(target, hidden[:, :, 1:], labels, config.loss)


def draft_blocks(
    draft: BoundDraft,
    target: Target,
    rows: PackedRows,
    context: Float[Array, "Z S D"],
    blocks: Blocks,
    config: ObjectiveConfig,
    forward: Forward = "tiles",
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

    attend = partial(block_attend, rows, blocks.anchors, settings.block_size, config.tiles, forward)
    embedded, positions = target.embed(flat(tokens)), flat(positions)
    hidden = draft(embedded, positions, context, rows.positions, attend, remat=config.remat)
    return hidden.reshape(batch, num_anchors, settings.block_size, -1)
