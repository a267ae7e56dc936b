"""The draft over the paged cache against a dense, cache-free draft: masks, windows, long context.

What goes wrong here shows nowhere else: the tokens stay the target's, only acceptance falls.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.cache import Batch
from dflash_jax.decoder import Pair, PairParams, draft_pass
from dflash_jax.layers import RMSNorm
from dflash_jax.request import SamplingParams
from dflash_jax.speculative import prefill_step
from dflash_jax.testing import draft_oracle, sampling_rows, tiny_pair

PAGE, CHUNK, BLOCK = 16, 256, 4
LONG = {"target": {"max_position_embeddings": 4096}}


def paged_block(pair: Pair, params: PairParams, tokens: list[int]) -> np.ndarray:
    """The draft's logits at the block of ``tokens``' last token, through pages and injection."""
    width = -(-len(tokens) // PAGE) + 1
    state = pair.new_state(slots=1, pages=width + 2, page_size=PAGE)
    table = jnp.asarray(np.random.default_rng(0).permutation(np.arange(2, width + 2))[None])
    rows = sampling_rows([SamplingParams()])
    batch = Batch(jnp.zeros(1, jnp.int32), table.astype(jnp.int32), rows)
    prefill = jax.jit(partial(prefill_step, pair), donate_argnums=1)
    context = tokens[:-1]
    for begin in range(0, len(context), CHUNK):
        chunk = np.zeros((1, CHUNK), np.int32)
        piece = context[begin : begin + CHUNK]
        chunk[0, : len(piece)] = piece
        ends = begin + CHUNK >= len(context)
        state, _ = prefill(
            params,
            state,
            batch,
            chunk,
            np.array([begin], np.int32),
            np.array([len(piece)], np.int32),
            np.array([ends]),
            np.array([tokens[-1]], np.int32),
        )
    run = jax.jit(partial(draft_pass, pair, block_size=BLOCK))
    return np.asarray(run(params, state, batch))[0]


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": (True, True)},
    "sliding": {"windows": (5, 5)},
    "sliding and causal": {"windows": (7, None), "causal": (True, False)},
    "window of one": {"windows": (1, 1)},
    "window within the block": {"windows": (3, 2), "causal": (True, True)},
}


def tokens_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 39, length).tolist()


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    # Float32 in two orders of summation; a mask that is off by one moves logits by 1e-2.
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [2, 50])
def test_masks(kind: str, length: int) -> None:
    """Faults 21, 22: each layer's window and causality are its own."""
    pair, params = tiny_pair(draft=KINDS[kind])
    tokens = tokens_of(length)
    expected = draft_oracle(pair, params, tokens, BLOCK)[1:]
    assert_close(paged_block(pair, params, tokens), expected)
    if kind != "full" and length == 50:
        full = draft_oracle(tiny_pair()[0], params, tokens, BLOCK)[1:]
        assert np.abs(full - expected).max() > 1e-2 * np.abs(full).max(), "the mask does nothing"


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_no_context_cap(kind: str) -> None:
    """Fault 24: a context of several chunks of every kind, none of it forgotten."""
    pair, params = tiny_pair(draft=KINDS[kind], **LONG)
    tokens = tokens_of(1500)
    expected = draft_oracle(pair, params, tokens, BLOCK)[1:]
    assert_close(paged_block(pair, params, tokens), expected)
    first_changed = [(tokens[0] + 1) % 39, *tokens[1:]]
    moved = np.abs(draft_oracle(pair, params, first_changed, BLOCK)[1:] - expected).max()
    assert moved > 1e-3 * np.abs(expected).max(), "the first token is not seen"
    assert_close(
        paged_block(pair, params, first_changed),
        draft_oracle(pair, params, first_changed, BLOCK)[1:],
    )


def test_the_last_layers_tap_is_before_the_final_norm() -> None:
    """Fault 18: HF's last hidden_states entry is normed; the tap is not."""
    pair, params = tiny_pair(draft={"target_layer_ids": (2,)})

    def features(scale: float) -> np.ndarray:
        changed = dict(params.target)
        changed["model.norm.weight"] = changed["model.norm.weight"] * scale
        target = pair.target.bind(changed)
        tokens = jnp.arange(5)[None]
        attend = lambda layer, q, k, v: jax.nn.dot_product_attention(q, k, v)  # noqa: E731
        return np.asarray(target(tokens, tokens, attend, pair.taps).features)

    np.testing.assert_array_equal(features(1.0), features(3.0))


def test_a_norms_gradient_is_summed_in_float32() -> None:
    """Over 16,384 tokens, whose contributions all point one way: a bfloat16 sum stands still at
    256 times what is added."""
    norm = RMSNorm(8, 1e-6, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    graph, state = nnx.split(norm)
    x = jnp.ones((16, 1024, 8), jnp.bfloat16)
    gradient = jax.grad(lambda s: nnx.merge(graph, s)(x).astype(jnp.float32).sum())(state)
    (of_weight,) = jax.tree.leaves(gradient)
    np.testing.assert_allclose(of_weight.astype(jnp.float32), 16 * 1024, rtol=2**-8)
