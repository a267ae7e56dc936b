"""What the laws are tested with: cache-free oracles, and equality as the project means it.

The oracles share the modules' weights and projections with the engine and nothing else: no pages,
no chunks, no kernels of ours; attention is ``jax.nn.dot_product_attention`` over whole sequences.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig
from dflash_jax.decoder import Pair, PairParams
from dflash_jax.request import SamplingParams
from dflash_jax.sampling import SamplingRows, filter_logits, gumbel_noise
from dflash_jax.sharding import Sharding, make_mesh

PADDING = 64  # the oracles compile once for every so many tokens
GAP = 1e-4  # of the logit scale: float32 GEMMs of 1 and of b rows differ by less than this


def visible(
    query: Int[Array, "T"], key: Int[Array, "S"], *, causal: bool, window: int | None
) -> Bool[Array, "T S"]:
    """Who sees whom by absolute position alone; a window W counts the query's own token."""
    distance = query[:, None] - key[None, :]
    mask = jnp.full(distance.shape, True)
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance < window
    return mask


def causal_attend(layer: int, q: Array, k: Array, v: Array) -> Array:
    """Full causal attention of a sequence over itself: a cache-free target's ``attend``."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def target_oracle(
    pair: Pair, params: PairParams, tokens: Sequence[int]
) -> tuple[Float[np.ndarray, "T V"], Float[np.ndarray, "T nD"]]:
    """Logits and tap features of a whole sequence, from one pass without a cache."""
    logits, features = _target_forward(pair, params.target, _padded(tokens))
    return np.asarray(logits)[0, : len(tokens)], np.asarray(features)[0, : len(tokens)]


def draft_oracle(
    pair: Pair, params: PairParams, tokens: Sequence[int], block_size: int
) -> Float[np.ndarray, "b V"]:
    """The draft's logits for the block that starts at the last of ``tokens`` (the anchor), its
    context recomputed from scratch. Row k is for position len(tokens) - 1 + k."""
    length = jnp.asarray(len(tokens) - 1, jnp.int32)
    return np.asarray(_draft_forward(pair, params, _padded(tokens), length, block_size))[0]


def draft_kv_oracle(
    pair: Pair, params: PairParams, tokens: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every draft layer's K and V [S, K, H] of ``tokens``' own features, from scratch."""
    layers = _draft_context(pair, params, _padded(tokens))
    return [(np.asarray(k)[0, : len(tokens)], np.asarray(v)[0, : len(tokens)]) for k, v in layers]


def target_kv_oracle(
    pair: Pair, params: PairParams, tokens: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every target layer's K and V [S, K, H] of ``tokens``, from scratch."""
    layers = _target_kv(pair, params.target, _padded(tokens))
    return [(np.asarray(k)[0, : len(tokens)], np.asarray(v)[0, : len(tokens)]) for k, v in layers]


def _padded(tokens: Sequence[int]) -> Int[np.ndarray, "1 T"]:
    padded = np.zeros((1, (len(tokens) // PADDING + 1) * PADDING), np.int32)
    padded[0, : len(tokens)] = tokens
    return padded


def _positions(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]


@partial(jax.jit, static_argnums=0)
def _target_forward(pair: Pair, params, tokens):
    target = pair.target.bind(params)
    output = target(tokens, _positions(tokens), causal_attend, pair.taps)
    return target.logits(output.hidden), output.features


@partial(jax.jit, static_argnums=0)
def _target_kv(pair: Pair, params, tokens):
    kept = []

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        kept.append((k, v))
        return causal_attend(layer, q, k, v)

    pair.target.bind(params)(tokens, _positions(tokens), attend)
    return kept


@partial(jax.jit, static_argnums=0)
def _draft_context(pair: Pair, params: PairParams, tokens):
    assert pair.draft is not None
    target, draft = pair.target.bind(params.target), pair.draft.bind(params.draft)
    features = target(tokens, _positions(tokens), causal_attend, pair.taps).features
    return draft.context_kv(draft.context(features), _positions(tokens))


@partial(jax.jit, static_argnums=(0, 4))
def _draft_forward(pair: Pair, params: PairParams, tokens, length, block_size: int):
    assert pair.draft is not None and pair.draft_config is not None
    config = pair.draft_config
    target, draft = pair.target.bind(params.target), pair.draft.bind(params.draft)
    context = _draft_context(pair, params, tokens)
    block = jnp.full((1, block_size), config.mask_token_id, jnp.int32)
    block = block.at[0, 0].set(tokens[0, length])
    query = length + jnp.arange(block_size, dtype=jnp.int32)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        keys = jnp.concatenate([context[layer][0], k], axis=1)
        values = jnp.concatenate([context[layer][1], v], axis=1)
        past = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        sees = partial(visible, window=config.windows[layer])
        mask = jnp.concatenate(
            [
                sees(query, past, causal=False) & (past < length)[None, :],
                sees(query, query, causal=config.causal[layer]),
            ],
            axis=1,
        )
        return jax.nn.dot_product_attention(q, keys, values, mask=mask[None, None])

    hidden = draft(target.embed(block), query[None, :], attend)
    return target.logits(hidden)


# Equality


@dataclasses.dataclass
class Tally:
    """How many sequences were compared, and every first difference that numerics excuse."""

    sequences: int = 0
    excused: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> None:
        """Raise AssertionError where excused differences are no longer rare (0.1 %)."""
        assert len(self.excused) <= max(1, self.sequences // 1000), "\n".join(self.excused)


def assert_same_tokens(
    pair: Pair,
    params: PairParams,
    prompt: Sequence[int],
    sampling: SamplingParams,
    expected: Sequence[int],
    got: Sequence[int],
    tally: Tally,
) -> None:
    """Speculative output ``got`` equals plain output ``expected``, token for token.

    A first difference is excused, counted in ``tally`` and printed where the oracle's two best
    tokens (noise included) lie closer than 1e-4 of the logit scale. Source: docs/dflash.md,
    section 6.
    """
    tally.sequences += 1
    if list(expected) == list(got):
        return
    pairs = zip(expected, got, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
    where = f"prompt of {len(prompt)}, {sampling}: output token {index}"
    if index == min(len(expected), len(got)):
        raise AssertionError(f"{where}: lengths {len(expected)} and {len(got)} differ")
    gap, scale = top_two_gap(pair, params, [*prompt, *expected[:index]], sampling)
    message = f"{where}: {expected[index]} != {got[index]}, gap {gap:.2e} at scale {scale:.2e}"
    assert gap < GAP * scale, f"{message}\nexpected {list(expected)}\ngot      {list(got)}"
    print("excused:", message)
    tally.excused.append(message)


def top_two_gap(
    pair: Pair, params: PairParams, tokens: Sequence[int], sampling: SamplingParams
) -> tuple[float, float]:
    """The gap of the two best candidates for the token after ``tokens``, and the logit scale."""
    logits = target_oracle(pair, params, tokens)[0][-1]
    if sampling.temperature > 0:
        rows = sampling_rows([sampling])
        scaled = jnp.asarray(logits)[None, None] / sampling.temperature
        noise = gumbel_noise(rows.seed, rows.choice, jnp.array([[len(tokens)]]), logits.shape[0])
        scores, scale = filter_logits(scaled, rows) + noise, float(jnp.abs(scaled).max())
    else:
        scores, scale = jnp.asarray(logits), float(np.abs(logits).max())
    second, first = np.sort(np.asarray(scores).ravel())[-2:]
    return float(first - second), scale


def sampling_rows(requests: Sequence[SamplingParams]) -> SamplingRows:
    """The device form of settings; an unseeded request takes seed 0."""
    seeds = [(r.seed or 0) % 2**64 for r in requests]

    def column(of: Callable[[SamplingParams], float], dtype) -> Array:
        return jnp.asarray([of(r) for r in requests], dtype)

    return SamplingRows(
        seed=jnp.asarray([[s >> 32, s & 0xFFFFFFFF] for s in seeds], jnp.uint32),
        choice=jnp.zeros(len(requests), jnp.uint32),
        temperature=column(lambda r: r.temperature, jnp.float32),
        top_k=column(lambda r: max(r.top_k, 0), jnp.int32),
        top_p=column(lambda r: r.top_p, jnp.float32),
        min_p=column(lambda r: r.min_p, jnp.float32),
    )


# Compilation


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by one event for every backend compilation while the context is open.

    A program that the persistent cache brings back counts too: it was asked for.
    """
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# Pairs


def tiny_pair(
    *,
    target: Mapping[str, Any] | None = None,
    draft: Mapping[str, Any] | None = None,
    sharding: Sharding | None = None,
    seed: int = 0,
) -> tuple[Pair, PairParams]:
    """A random pair that compiles in a second; ``target`` and ``draft`` change fields.

    Weights are large enough for features, positions and masks to move the logits.
    """
    shared = {
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=1e4),
        "max_position_embeddings": 256,
    }
    target_config = TargetConfig(
        **{
            **shared,
            "num_layers": 3,
            "architecture": "qwen3",
            "tie_word_embeddings": False,
            "qk_norm": True,
            **(target or {}),
        }
    )
    draft_fields = {
        **shared,
        "num_layers": 2,
        "block_size": 4,
        "mask_token_id": target_config.vocab_size - 1,
        "target_layer_ids": (0, target_config.num_layers - 1),
        "num_target_layers": target_config.num_layers,
        "target_hidden_size": target_config.hidden_size,
        "vocab_size": target_config.vocab_size,
        "max_position_embeddings": target_config.max_position_embeddings,
        **(draft or {}),
    }
    layers = draft_fields["num_layers"]
    draft_config = DraftConfig(
        **{"windows": (None,) * layers, "causal": (False,) * layers, **draft_fields}
    )
    placement = sharding or Sharding(make_mesh())
    pair = Pair.of(target_config, draft_config, placement, jnp.dtype(jnp.float32))

    def enlarged(leaf: Array) -> Array:
        return leaf * 12 if leaf.ndim == 2 else leaf

    return pair, jax.tree.map(enlarged, pair.init(seed))
