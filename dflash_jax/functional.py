"""flax.nnx modules as pure functions of a flat parameter dict."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
from flax import nnx

from dflash_jax.sharding import Axis, Sharding

ModuleT = TypeVar("ModuleT", bound=nnx.Module)
Params = Mapping[str, jax.Array]
"""Parameters by dotted path, e.g. ``model.layers.0.self_attn.q_proj.kernel``."""


@dataclasses.dataclass(frozen=True, eq=False)
class Functional(Generic[ModuleT]):
    """A module split into its static graph and its parameters; it holds no arrays itself."""

    graph: nnx.GraphDef
    treedef: Any
    abstract: Mapping[str, jax.ShapeDtypeStruct]
    axes: Mapping[str, tuple[Axis, ...]]
    build: Callable[[nnx.Rngs], ModuleT]

    @classmethod
    def of(cls, build: Callable[[nnx.Rngs], ModuleT]) -> "Functional[ModuleT]":
        """Describe ``build``'s module without allocating anything."""
        graph, state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
        abstract, axes = {}, {}
        for path, variable in nnx.to_flat_state(state):
            name = ".".join(str(part) for part in path)
            abstract[name] = jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            axes[name] = variable.get_metadata("logical_axes")
        return cls(graph, jax.tree.structure(state), abstract, axes, build)

    def bind(self, params: Params) -> ModuleT:
        """The module over ``params``; call it inside jit. Raises KeyError on a missing name."""
        leaves = [params[name] for name in self.abstract]
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))

    def init(self, seed: int, sharding: Sharding) -> dict[str, jax.Array]:
        """Random parameters, made in place on their shards."""

        def make():
            _, state = nnx.split(self.build(nnx.Rngs(seed)))
            return dict(zip(self.abstract, jax.tree.leaves(state), strict=True))

        placements = {name: leaf.sharding for name, leaf in self.placed(sharding).items()}
        return jax.jit(make, out_shardings=placements)()

    def placed(self, sharding: Sharding) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract parameters with their shardings: what a loader fills and AOT compiles for."""
        return {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding.of(self.axes[name], leaf.shape)
            )
            for name, leaf in self.abstract.items()
        }
