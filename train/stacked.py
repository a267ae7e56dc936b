"""Target and draft as training runs them: layers as scans over stacked weights.

Program size and compile time do not grow with depth, and a layer's weights are gathered over fsdp
when its turn comes and dropped after it. The layers themselves are the modules that decode.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.config import DraftConfig
from dflash_jax.decoder import Pair
from dflash_jax.draft import Draft
from dflash_jax.functional import Functional, Params
from dflash_jax.layers import Attend, Block
from dflash_jax.models import DenseTarget, TargetOutput
from dflash_jax.sharding import Sharding

TARGET_LAYERS, DRAFT_LAYERS = "model.layers.", "layers."
KV = tuple[Array, Array]
BlockAttend = Callable[[KV, Array, Array, Array], Array]
"""(context K and V [Z,S,K,H], q [Z*A,b,N,H], k, v of the blocks) -> [Z*A,b,N,H]"""


class Target(Protocol):
    """What the objective asks of a target: a DenseTarget, or what FrozenTarget binds."""

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]: ...
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        taps: tuple[int, ...] = (),
    ) -> TargetOutput: ...
    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]: ...
    def hidden_gradient(self, gradient: Float[Array, "... V"]) -> Float[Array, "... D"]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenTarget:
    """A pair's target over stacked parameters: ``model.layers.NAME`` [L, ...] for every
    ``model.layers.i.NAME`` [...]. ``ends``: embedding, last norm and head."""

    ends: Functional[DenseTarget]
    block: Functional[Block]
    depth: int
    sharding: Sharding

    @classmethod
    def of(cls, pair: Pair) -> "FrozenTarget":
        config, dtype = pair.target_config, pair.dtype
        ends = dataclasses.replace(config, num_layers=0)
        return cls(
            Functional.of(lambda rngs: DenseTarget(ends, rngs=rngs, dtype=dtype)),
            Functional.of(
                lambda rngs: Block(config, qk_norm=config.qk_norm, rngs=rngs, dtype=dtype)
            ),
            config.num_layers,
            pair.sharding,
        )

    def placed(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract stacked parameters with their shardings."""
        stacked = self.ends.placed(self.sharding)
        for name, leaf in self.block.abstract.items():
            shape = (self.depth, *leaf.shape)
            placement = self.sharding.of((None, *self.block.axes[name]), shape)
            stacked[TARGET_LAYERS + name] = jax.ShapeDtypeStruct(
                shape, leaf.dtype, sharding=placement
            )
        return stacked

    def stack(self, params: Params) -> dict[str, jax.Array]:
        """Stacked parameters from a target's own; its ends are shared, not copied."""
        stacked = {name: params[name] for name in self.ends.abstract}
        placed = self.placed()
        for name in self.block.abstract:  # one at a time: twice one stack at most
            layers = [params[f"{TARGET_LAYERS}{i}.{name}"] for i in range(self.depth)]
            placement = placed[TARGET_LAYERS + name].sharding
            join = jax.jit(lambda *x: jnp.stack(x), out_shardings=placement)
            stacked[TARGET_LAYERS + name] = join(*layers)
        return stacked

    def bind(self, params: Params) -> Target:
        """The target over stacked ``params``; call it inside jit."""
        return _BoundTarget(self, params)


class _BoundTarget:
    def __init__(self, target: FrozenTarget, params: Params):
        self._target, self._params = target, params
        self._ends = target.ends.bind(_gather(target.sharding, target.ends, params))
        self.embed, self.logits = self._ends.embed, self._ends.logits
        self.hidden_gradient = self._ends.hidden_gradient

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        taps: tuple[int, ...] = (),
    ) -> TargetOutput:
        """As DenseTarget's; ``attend`` is the same for every layer (it is told 0)."""
        depth, sharding, block = self._target.depth, self._target.sharding, self._target.block
        # Where a layer's output goes: its tap's place, or a last one that nobody reads.
        places = [taps.index(i) if i in taps else len(taps) for i in range(depth)]

        def layer(carry, turn):
            x, captured = carry
            weights, place = turn
            run = block.bind(_gather(sharding, block, weights))
            x = sharding.constrain(run(x, positions, attend, 0), "rows", None, None)
            return (x, jax.lax.dynamic_update_index_in_dim(captured, x, place, 0)), None

        x = sharding.constrain(self.embed(tokens), "rows", None, None)
        captured = jnp.zeros((len(taps) + 1, *x.shape), x.dtype)
        stacked = {name: self._params[TARGET_LAYERS + name] for name in block.abstract}
        (x, captured), _ = jax.lax.scan(
            layer, (x, captured), (stacked, jnp.asarray(places, jnp.int32))
        )
        features = [captured[i] for i in range(len(taps))] or [x[..., :0]]
        return TargetOutput(self._ends.model.norm(x), jnp.concatenate(features, -1))


@dataclasses.dataclass(frozen=True, eq=False)
class StackedDraft:
    """A pair's draft over its own parameters, stacked as it runs."""

    config: DraftConfig
    ends: Functional[Draft]
    block: Functional[Block]
    sharding: Sharding

    @classmethod
    def of(cls, pair: Pair) -> "StackedDraft":
        config, dtype = pair.draft_config, pair.dtype
        assert config is not None
        ends = dataclasses.replace(config, num_layers=0)
        return cls(
            config,
            Functional.of(lambda rngs: Draft(ends, rngs=rngs, dtype=dtype)),
            Functional.of(lambda rngs: Block(config, qk_norm=True, rngs=rngs, dtype=dtype)),
            pair.sharding,
        )

    def bind(self, params: Params) -> "BoundDraft":
        """The draft over ``params``; call it inside jit."""
        return BoundDraft(self, params)


class BoundDraft:
    """A draft in training. The context feature C comes from ``context``."""

    def __init__(self, draft: StackedDraft, params: Params):
        self._draft, self._params, self.config = draft, params, draft.config
        self._ends = draft.ends.bind(_gather(draft.sharding, draft.ends, params))
        self.context = self._ends.context

    def __call__(
        self,
        x: Float[Array, "B b D"],
        positions: Int[Array, "B b"],
        context: Float[Array, "Z S D"],
        context_positions: Int[Array, "Z S"],
        attend: Callable[[int | None, bool], BlockAttend],
        *,
        remat: bool = False,
    ) -> Float[Array, "B b D"]:
        """Final hidden states of blocks over injected context.

        ``attend(window, causal)``: the attention of a layer of that kind. ``remat``: the backward
        pass recomputes a layer from its input instead of keeping what it computed.
        """
        block, sharding = self._draft.block, self._draft.sharding
        kinds = list(zip(self.config.windows, self.config.causal, strict=True))
        for kind, run in itertools.groupby(range(len(kinds)), kinds.__getitem__):
            attend_kind = attend(*kind)

            def layer(x: Array, weights: Mapping[str, Array], attend_kind=attend_kind):
                module = block.bind(_gather(sharding, block, weights))
                kv = module.self_attn.key_value(context, context_positions)
                x = module(x, positions, lambda _, *qkv: attend_kind(kv, *qkv), 0)
                return sharding.constrain(x, "rows", None, None), None

            body = jax.checkpoint(layer) if remat else layer
            layers = list(run)
            stacked = {
                name: jnp.stack([self._params[f"{DRAFT_LAYERS}{i}.{name}"] for i in layers])
                for name in block.abstract
            }
            x, _ = jax.lax.scan(body, x, stacked)
        return self._ends.norm(x)


def _gather(sharding: Sharding, functional: Functional, params: Params) -> dict[str, Array]:
    """``params`` of a module as its products want them: whole over fsdp, split over model.

    Said outright: left to itself the compiler moves activations to the weights' shards instead
    (67 all-to-alls in a step of 8 layers, and three times the memory).
    """
    whole = dataclasses.replace(sharding, rules={**sharding.rules, "embed": None})
    return {
        name: whole.constrain(params[name], *functional.axes[name]) for name in functional.abstract
    }
