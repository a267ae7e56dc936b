"""A target and its draft, and the passes over the slot space that every step is made of."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.cache import (
    POOL,
    TABLE,
    VECTOR,
    Batch,
    DecodeState,
    KVPools,
    WritingAttend,
    allocate,
    kv_heads,
    paged_attend,
    repeat_heads,
)
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.draft import Draft
from dflash_jax.functional import Functional, Params
from dflash_jax.models import DenseTarget, TargetOutput
from dflash_jax.rope import rope_frequencies
from dflash_jax.sharding import Sharding, partition
from pallas_kernels import kv_injection

INJECTION = (None, None, "kv_heads", None, None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InjectionWeights:
    """The draft's k_proj, v_proj and k_norm of every layer, as one kernel reads them. A second copy
    of the projections (a percent of a pair): the draft's own layers multiply by the first."""

    weights: Float[Array, "L 2 K H D"]
    k_norms: Float[Array, "L H"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairParams:
    """Parameters by dotted path; ``draft`` is empty for a target alone. Without ``injection`` (see
    ``Pair.prepared``) each step stacks the weights anew."""

    target: Params
    draft: Params
    injection: InjectionWeights | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """The static half of a (target, draft) pair: modules without arrays, and their mesh."""

    target: Functional[DenseTarget]
    draft: Functional[Draft] | None
    target_config: TargetConfig
    draft_config: DraftConfig | None
    sharding: Sharding
    dtype: jnp.dtype

    @classmethod
    def of(
        cls,
        target_config: TargetConfig,
        draft_config: DraftConfig | None,
        sharding: Sharding,
        dtype: jnp.dtype,
    ) -> "Pair":
        def build_target(rngs: nnx.Rngs) -> DenseTarget:
            return DenseTarget(target_config, rngs=rngs, dtype=dtype)

        draft = None
        if draft_config is not None:
            draft = Functional.of(lambda rngs: Draft(draft_config, rngs=rngs, dtype=dtype))
        return cls(Functional.of(build_target), draft, target_config, draft_config, sharding, dtype)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft_config.target_layer_ids if self.draft_config else ()

    def init(self, seed: int = 0) -> PairParams:
        """Random parameters."""
        draft = self.draft.init(seed + 1, self.sharding) if self.draft else {}
        return PairParams(self.target.init(seed, self.sharding), draft)

    def prepared(self, params: PairParams) -> PairParams:
        """``params`` with what steps would otherwise make of them every time, unless they have
        it."""
        if self.draft is None or params.injection is not None:
            return params
        stack = jax.jit(partial(injection_weights, self))
        return dataclasses.replace(params, injection=stack(params.draft))

    def new_state(self, *, slots: int, pages: int, page_size: int) -> DecodeState:
        """An empty slot space: ``slots`` + 1 padding slot, ``pages`` pages a data shard of which
        page 0 is the null page."""
        make = partial(
            allocate, pages=pages, page_size=page_size, dtype=self.dtype, sharding=self.sharding
        )
        replicated = jax.sharding.NamedSharding(self.sharding.mesh, partition())
        zeros = jnp.zeros(slots + 1, jnp.int32, device=replicated)
        return DecodeState(
            make(self.target_config), make(self.draft_config), zeros, jnp.copy(zeros)
        )


def target_pass(
    pair: Pair,
    params: PairParams,
    state: DecodeState,
    batch: Batch,
    tokens: Int[Array, "B T"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
) -> tuple[TargetOutput, DecodeState]:
    """Run ``tokens`` causally at ``start..`` and keep the KV of each row's first ``count``."""
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    attend = WritingAttend(state.target_kv, batch.page_table, start, count, pair.sharding)
    output = pair.target.bind(params.target)(tokens, positions, attend, pair.taps)
    return output, dataclasses.replace(state, target_kv=attend.pools)


def draft_pass(
    pair: Pair,
    params: PairParams,
    state: DecodeState,
    batch: Batch,
    block_size: int,
    width: int | None = None,
) -> Float[Array, "B k-1 V"]:
    """Logits for positions s+1..s+k-1 of every row, from one pass over [anchor, MASK, ...].

    The pass is always over ``block_size`` b slots; the head reads the first ``width`` k of them
    (default b).
    """
    assert pair.draft is not None and pair.draft_config is not None
    config = pair.draft_config
    start, anchors = state.lengths[batch.slots], state.anchors[batch.slots]
    masks = jnp.full((start.shape[0], block_size - 1), config.mask_token_id, jnp.int32)
    block = jnp.concatenate([anchors[:, None], masks], axis=1)
    positions = start[:, None] + jnp.arange(block_size, dtype=jnp.int32)[None, :]
    target, draft = pair.target.bind(params.target), pair.draft.bind(params.draft)
    attend = paged_attend(
        state.draft_kv,
        batch.page_table,
        start,
        pair.sharding,
        causal=lambda layer: config.causal[layer],
        window=lambda layer: config.windows[layer],
    )
    hidden = draft(target.embed(block), positions, attend)
    return target.logits(hidden[:, 1:width])


def inject(
    pair: Pair,
    params: PairParams,
    state: DecodeState,
    batch: Batch,
    features: Float[Array, "B T nD"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
) -> DecodeState:
    """Turn the first ``count`` features of each row into draft KV at ``start..``, at once: hidden
    states are never stored. A no-op without a draft."""
    if pair.draft is None or pair.draft_config is None:
        return state
    config = pair.draft_config
    stacked = params.injection or injection_weights(pair, params.draft)
    frequencies, factor = rope_frequencies(config.rope, config.head_dim)
    run = jax.shard_map(
        partial(
            kv_injection,
            inverse_frequencies=jnp.asarray(frequencies),
            attention_factor=factor,
            eps=config.rms_norm_eps,
        ),
        mesh=pair.sharding.mesh,
        in_specs=(
            partition("rows", None, None),
            partition(*INJECTION),
            partition(),
            POOL,
            POOL,
            TABLE,
            VECTOR,
            VECTOR,
        ),
        out_specs=(POOL, POOL),
        check_vma=False,
    )
    k, v = run(
        pair.draft.bind(params.draft).context(features),
        stacked.weights,
        stacked.k_norms,
        state.draft_kv.k,
        state.draft_kv.v,
        batch.page_table,
        start,
        count,
    )
    return dataclasses.replace(state, draft_kv=KVPools(k, v))


def injection_weights(pair: Pair, draft: Params) -> InjectionWeights:
    """Stack what injection reads of a draft's parameters, each kv head once a head of the pools."""
    assert pair.draft is not None and pair.draft_config is not None
    config = pair.draft_config
    heads = kv_heads(config, pair.sharding)
    attentions = [layer.self_attn for layer in pair.draft.bind(draft).layers]

    def by_head(kernel: Float[Array, "D KH"]) -> Float[Array, "R H D"]:
        per_head = kernel.reshape(-1, config.num_kv_heads, config.head_dim)
        return repeat_heads(per_head, heads).transpose(1, 2, 0)

    weights = jnp.stack(
        [
            jnp.stack([by_head(a.k_proj.kernel[...]), by_head(a.v_proj.kernel[...])])
            for a in attentions
        ]
    )
    norms = jnp.stack([a.k_norm.weight[...] for a in attentions])
    return InjectionWeights(pair.sharding.constrain(weights, *INJECTION), norms)
