"""The jitted steps: prefill a chunk; draft, verify, accept and inject one block.

Both are pure, fully static functions of (params, state, batch); drivers jit them with ``state``
donated. Source: docs/dflash.md, section 1: the paper's algorithm with equality acceptance, so the
output is the target's own whatever the draft says.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.cache import Batch, DecodeState
from dflash_jax.decoder import Pair, PairParams, draft_pass, inject, target_pass
from dflash_jax.sampling import draw

DraftSampling = Literal["argmax", "coupled"]
"""How draft tokens are taken: argmax, or drawn with the target's own position-keyed noise. Both
are exact, because acceptance is equality with the target's draw, and the same at T = 0. Coupled
is the default: at T = 1 it lifts the embedded draft's tau on MT-Bench from 1.36 to 1.58
(LOG.md)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cycle:
    """What one cycle committed: row b's new tokens are ``tokens[b, :count[b]]``.

    ``count`` is accepted drafts + 1; the last committed token is the new anchor.
    """

    tokens: Int[Array, "B k"]
    count: Int[Array, "B"]


def prefill_step(
    pair: Pair,
    params: PairParams,
    state: DecodeState,
    batch: Batch,
    tokens: Int[Array, "B C"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    last: Bool[Array, "B"],
    forced: Int[Array, "B"],
) -> tuple[DecodeState, Int[Array, "B"]]:
    """Run one prompt chunk of each row: ``count`` tokens at positions ``start..``.

    Target KV and draft KV of the chunk are written. Rows whose prompt ends here (``last``) draw
    their first token, which becomes their anchor; a resumed row names its own in ``forced`` (-1:
    draw). Returns the state and the anchors.
    """
    output, state = target_pass(pair, params, state, batch, tokens, start, count)
    state = inject(pair, params, state, batch, output.features, start, count)
    end = jnp.maximum(count - 1, 0)
    final = jnp.take_along_axis(output.hidden, end[:, None, None], axis=1)
    logits = pair.target.bind(params.target).logits(final)
    length = start + count
    drawn = draw(logits, batch.sampling, length[:, None])[:, 0]
    first = jnp.where(forced >= 0, forced, drawn)
    anchors = jnp.where(last, first, state.anchors[batch.slots])
    return state.advance(batch.slots, length, anchors), anchors


def speculative_step(
    pair: Pair,
    params: PairParams,
    state: DecodeState,
    batch: Batch,
    *,
    block_size: int,
    verify_width: int | None = None,
    draft_sampling: DraftSampling = "coupled",
) -> tuple[DecodeState, Cycle]:
    """One cycle for B rows of any lengths, requests, temperatures and seeds.

    ``block_size`` b counts the anchor; the draft runs at b and the target verifies the first
    ``verify_width`` k <= b tokens (default b).
    """
    width = block_size if verify_width is None else verify_width
    if not 2 <= width <= block_size:
        raise ValueError(f"need 2 <= verify_width <= block_size, got {width} and {block_size}")
    start, anchors = state.lengths[batch.slots], state.anchors[batch.slots]
    positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]

    draft_logits = draft_pass(pair, params, state, batch, block_size, width)
    if draft_sampling == "coupled":
        drafts = draw(draft_logits, batch.sampling, positions[:, 1:])
    else:
        drafts = jnp.argmax(draft_logits, axis=-1).astype(jnp.int32)

    block = jnp.concatenate([anchors[:, None], drafts], axis=1)
    rows = jnp.full_like(start, width)
    output, state = target_pass(pair, params, state, batch, block, start, rows)
    logits = pair.target.bind(params.target).logits(output.hidden)
    tokens = draw(logits, batch.sampling, positions + 1)

    agrees = (drafts == tokens[:, :-1]).astype(jnp.int32)
    accepted = jnp.cumprod(agrees, axis=1).sum(axis=1)
    count = accepted + 1
    state = inject(pair, params, state, batch, output.features, start, count)
    new_anchor = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
    state = state.advance(batch.slots, start + count, new_anchor)
    return state, Cycle(tokens, count)
