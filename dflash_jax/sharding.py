"""The ("data", "model") mesh and the table from logical to mesh axes.

Rows of a batch and pages split over "data" (each shard owns its slots, its pages and its page ids);
heads, ffn and vocabulary split over "model".
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

RULES: Mapping[str, str | None] = {
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


def partition(*axes: Axis) -> PartitionSpec:
    """Placement of logical ``axes``, by ``RULES``."""
    return PartitionSpec(*(RULES[_name(axis)] if axis else None for axis in axes))


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
    """Maps logical axes of one mesh to placements."""

    mesh: Mesh

    @property
    def data(self) -> int:
        return self.mesh.shape["data"]

    @property
    def model(self) -> int:
        return self.mesh.shape["model"]

    def of(self, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Placement of an array. A dim whose units its mesh axis does not divide is replicated: kv
        heads that several chips share, an odd vocabulary."""
        names: list[str | None] = []
        for axis, dim, name in zip(axes, shape, partition(*axes), strict=True):
            units = dim // axis[1] if isinstance(axis, tuple) else dim
            names.append(name if name and units % self.mesh.shape[name] == 0 else None)
        return NamedSharding(self.mesh, PartitionSpec(*names))
