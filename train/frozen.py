"""The target as training runs it: frozen, its layers one scan over stacked weights.

Program size and compile time do not grow with depth, and a layer's weights are gathered over fsdp
when its turn comes and dropped after it.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.decoder import Pair
from dflash_jax.functional import Functional, Params
from dflash_jax.layers import Attend, Block
from dflash_jax.models import DenseTarget, TargetOutput
from dflash_jax.sharding import Sharding

LAYERS = "model.layers."


class Target(Protocol):
    """What the objective asks of a target: a DenseTarget, or a FrozenTarget's ``bind``."""

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


class FrozenTarget:
    """A pair's target over stacked parameters: ``model.layers.NAME`` [L, ...] for every
    ``model.layers.i.NAME`` [...]."""

    def __init__(self, pair: Pair):
        config, dtype = pair.target_config, pair.dtype
        ends = dataclasses.replace(config, num_layers=0)
        self._config, self._sharding, self._whole = config, pair.sharding, pair.target
        self._ends = Functional.of(lambda rngs: DenseTarget(ends, rngs=rngs, dtype=dtype))
        self._block = Functional.of(
            lambda rngs: Block(config, qk_norm=config.qk_norm, rngs=rngs, dtype=dtype)
        )

    def placed(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract stacked parameters with their shardings."""
        stacked = self._ends.placed(self._sharding)
        depth = self._config.num_layers
        for name, leaf in self._block.abstract.items():
            shape = (depth, *leaf.shape)
            placement = self._sharding.of((None, *self._block.axes[name]), shape)
            stacked[LAYERS + name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=placement)
        return stacked

    def stack(self, params: Params) -> dict[str, jax.Array]:
        """Stacked parameters of a target's own; those of its ends are shared, not copied."""
        placed = self.placed()
        stacked = {name: params[name] for name in self._ends.abstract}
        for name in self._block.abstract:  # one at a time: twice one stack at most
            layers = [params[f"{LAYERS}{i}.{name}"] for i in range(self._config.num_layers)]
            stack = jax.jit(lambda *x: jnp.stack(x), out_shardings=placed[LAYERS + name].sharding)
            stacked[LAYERS + name] = stack(*layers)
        return stacked

    def bind(self, params: Params) -> "Target":
        """The target over ``params``, stacked; call it inside jit."""
        return _Bound(self, params)


def gather(sharding: Sharding, functional: Functional, params: Params) -> dict[str, Array]:
    """``params`` of a module as its products want them: whole over fsdp, split over model.

    Said outright: left to itself the compiler may move activations to the weights' shards.
    """
    whole = dataclasses.replace(sharding, rules={**sharding.rules, "embed": None})
    return {
        name: whole.constrain(params[name], *functional.axes[name]) for name in functional.abstract
    }


class _Bound:
    def __init__(self, frozen: FrozenTarget, params: Params):
        self._frozen, self._params = frozen, params
        self._ends = frozen._ends.bind(gather(frozen._sharding, frozen._ends, params))
        self.embed, self.logits = self._ends.embed, self._ends.logits
        self.hidden_gradient = self._ends.hidden_gradient

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        taps: tuple[int, ...] = (),
    ) -> TargetOutput:
        """As DenseTarget's; ``attend`` must be the same for every layer (it is told 0)."""
        frozen, sharding = self._frozen, self._frozen._sharding
        names = tuple(frozen._block.abstract)
        depth, count = frozen._config.num_layers, len(taps)
        # Where a layer's output goes: its tap's place, or a last one that nobody reads.
        places = [taps.index(i) if i in taps else count for i in range(depth)]

        def layer(carry, turn):
            x, captured = carry
            weights, place = turn
            block = frozen._block.bind(gather(sharding, frozen._block, weights))
            x = sharding.constrain(block(x, positions, attend, 0), "rows", None, None)
            return (x, jax.lax.dynamic_update_index_in_dim(captured, x, place, 0)), None

        x = sharding.constrain(self.embed(tokens), "rows", None, None)
        captured = jnp.zeros((count + 1, *x.shape), x.dtype)
        stacked = {name: self._params[LAYERS + name] for name in names}
        (x, captured), _ = jax.lax.scan(
            layer, (x, captured), (stacked, jnp.asarray(places, jnp.int32))
        )
        features = jnp.concatenate([captured[i] for i in range(count)], -1) if taps else x[..., :0]
        return TargetOutput(self._ends.model.norm(x), features)
