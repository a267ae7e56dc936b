"""The ("data", "model") mesh and the table from logical to mesh axes.

Rows of a batch and pages split over "data" (each shard owns its slots, its pages and its page ids);
heads, ffn and vocabulary split over "model".
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Rules = Mapping[str, str | tuple[str, ...] | None]
"""From logical axes to the mesh axes that they are split over."""

RULES: Rules = {
    "rows": "data",
    "pages": "data",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "ffn": "model",
    "embed": None,
}

Axis = str | tuple[str, int] | None
"""A logical axis; (axis, unit) where it is cut between units only: a head stays whole."""


def partition(*axes: Axis, rules: Rules = RULES) -> PartitionSpec:
    """Placement of logical ``axes``."""
    return PartitionSpec(*(rules[_name(axis)] if axis else None for axis in axes))


def _name(axis: str | tuple[str, int]) -> str:
    return axis if isinstance(axis, str) else axis[0]


def make_mesh(data: int = 1, model: int = 1, devices=None) -> Mesh:
    """A mesh over the first data * model devices. Raises ValueError when there are too few, or
    sizes below 1."""
    if data < 1 or model < 1:
        raise ValueError(
            f"data and model parallel sizes must be at least 1, got {data} and {model}"
        )
    devices = jax.devices() if devices is None else devices
    if len(devices) < data * model:
        raise ValueError(
            f"a {data} x {model} (data x model) mesh needs {data * model} devices, "
            f"found {len(devices)} of platform {devices[0].platform}"
        )
    grid = np.array(devices[: data * model]).reshape(data, model)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Maps logical axes of one mesh to placements. Decoding has the default ``rules``."""

    mesh: Mesh
    rules: Rules = dataclasses.field(default_factory=lambda: RULES, hash=False)

    @property
    def data(self) -> int:
        return self.mesh.shape["data"]

    @property
    def model(self) -> int:
        return self.mesh.shape["model"]

    def of(self, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Placement of an array. A dim whose units its mesh axes do not divide is replicated: kv
        heads that several chips share, an odd vocabulary."""
        names: list[str | tuple[str, ...] | None] = []
        for axis, dim, name in zip(axes, shape, partition(*axes, rules=self.rules), strict=True):
            units = dim // axis[1] if isinstance(axis, tuple) else dim
            names.append(name if name and units % self._size(name) == 0 else None)
        return NamedSharding(self.mesh, PartitionSpec(*names))

    def constrain(self, x: jax.Array, *axes: Axis) -> jax.Array:
        """``x``, placed by its logical ``axes``, inside jit."""
        return jax.lax.with_sharding_constraint(x, self.of(axes, x.shape))

    def _size(self, names: str | tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[n] for n in ([names] if isinstance(names, str) else names))
