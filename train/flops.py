"""Model FLOPs of one training step, counted from shapes alone.

A product of [m, k] and [k, n] is 2 m k n; nothing but matrix products counts, and nothing counts
twice: what the backward pass computes again (remat, scores of attention) is not the model's.
Attention counts what a query sees, not the tiles around it. Rows are taken as full: one document
each, anchors evenly over it.
"""

from typing import NamedTuple

import numpy as np

from dflash_jax.config import DraftConfig, TargetConfig, TransformerConfig


class StepFlops(NamedTuple):
    """``target``: its forward pass. ``draft``: forward and backward. ``head``: of the block slots,
    forward and back to their hidden states (the head is frozen), and the teacher's logits where
    the loss has a KL share."""

    target: float
    draft: float
    head: float

    @property
    def total(self) -> float:
        return self.target + self.draft + self.head


def step_flops(
    target: TargetConfig,
    draft: DraftConfig,
    *,
    rows: int,
    row_length: int,
    anchors: int,
    kl: bool = False,
) -> StepFlops:
    """FLOPs of a step over ``rows`` full rows with ``anchors`` blocks each."""
    forward = forward_flops(target, draft, rows=rows, row_length=row_length, anchors=anchors, kl=kl)
    # Gradients by weights and by inputs: twice the forward. The features are frozen: their
    # projection needs its weights' gradient alone.
    projection = rows * row_length * _feature_projection(draft)
    head = rows * anchors * (draft.block_size - 1) * _head(target)
    return StepFlops(forward.target, 3 * forward.draft - projection, forward.head + head)


def forward_flops(
    target: TargetConfig,
    draft: DraftConfig,
    *,
    rows: int,
    row_length: int,
    anchors: int,
    kl: bool = False,
) -> StepFlops:
    """The same without any backward pass: what scoring held-out rows takes."""
    size = draft.block_size
    tokens, slots = rows * row_length, rows * anchors * size
    causal = rows * row_length * (row_length + 1) / 2  # pairs of a query and a key that it sees
    target_flops = target.num_layers * (
        tokens * (_query_and_output(target) + _key_value(target) + _mlp(target))
        + causal * _pair(target)
    )
    draft_flops = tokens * (_feature_projection(draft) + draft.num_layers * _key_value(draft))
    draft_flops += (
        slots * draft.num_layers * (_query_and_output(draft) + _key_value(draft) + _mlp(draft))
    )
    for window, is_causal in zip(draft.windows, draft.causal, strict=True):
        seen = _context_seen(row_length, size, window) + _block_seen(size, window, is_causal)
        draft_flops += rows * anchors * seen * _pair(draft)
    head = rows * anchors * (size - 1) * _head(target) * (2 if kl else 1)
    return StepFlops(target_flops, draft_flops, head)


def _query_and_output(config: TransformerConfig) -> int:
    return 4 * config.hidden_size * config.num_heads * config.head_dim


def _key_value(config: TransformerConfig) -> int:
    return 4 * config.hidden_size * config.num_kv_heads * config.head_dim


def _mlp(config: TransformerConfig) -> int:
    return 6 * config.hidden_size * config.intermediate_size


def _pair(config: TransformerConfig) -> int:
    """A query's score of one key, and that key's share of its value, over all heads."""
    return 4 * config.num_heads * config.head_dim


def _head(target: TargetConfig) -> int:
    return 2 * target.hidden_size * target.vocab_size


def _feature_projection(draft: DraftConfig) -> int:
    return 2 * len(draft.target_layer_ids) * draft.target_hidden_size * draft.hidden_size


def _context_seen(row_length: int, block_size: int, window: int | None) -> float:
    """Context keys that all slots of a block see, the mean over anchors: slot o of anchor a sees
    the keys before a and, under a window W, after a + o - W."""
    anchor = np.arange(row_length - 1)[:, None]  # the last token has no label after it
    offset = np.arange(block_size)[None, :]
    first = np.zeros_like(anchor + offset) if window is None else anchor + offset - (window - 1)
    return float(np.maximum(anchor - np.maximum(first, 0), 0).sum(1).mean())


def _block_seen(block_size: int, window: int | None, causal: bool) -> int:
    """Pairs of slots of one block that see each other."""
    offset = np.arange(block_size)
    distance = offset[:, None] - offset[None, :]
    visible = distance >= 0 if causal else np.ones_like(distance, bool)
    if window is not None:
        visible &= distance < window
    return int(visible.sum())
