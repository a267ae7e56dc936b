"""Plain decoding, one token a step: the oracle of every law, and what ``--no-draft`` runs."""

import jax.numpy as jnp

from dflash_jax.cache import Batch, DecodeState
from dflash_jax.decoder import Pair, PairParams, inject, target_pass
from dflash_jax.sampling import draw
from dflash_jax.speculative import Cycle


def plain_step(
    pair: Pair, params: PairParams, state: DecodeState, batch: Batch
) -> tuple[DecodeState, Cycle]:
    """Run each row's anchor and draw the next token: T = 1, no draft.

    A pair with a draft still injects, so a row can go back to speculation at any step.
    """
    start, anchors = state.lengths[batch.slots], state.anchors[batch.slots]
    one = jnp.ones_like(start)
    output, state = target_pass(pair, params, state, batch, anchors[:, None], start, one)
    state = inject(pair, params, state, batch, output.features, start, one)
    logits = pair.target.bind(params.target).logits(output.hidden)
    tokens = draw(logits, batch.sampling, start[:, None] + 1)
    return state.advance(batch.slots, start + 1, tokens[:, 0]), Cycle(tokens, one)
