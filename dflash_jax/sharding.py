"""The ("data", "model") mesh and the table from logical to mesh axes.

Slots and pages split over "data" (each shard owns its slots, its pages and its page ids); heads,
ffn and vocabulary split over "model".
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

RULES: Mapping[str, str | None] = {
    "slots": "data",
    "pages": "data",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "ffn": "model",
    "embed": None,
}


def make_mesh(data: int = 1, model: int = 1, devices=None) -> Mesh:
    """A mesh over the first data * model devices. Raises ValueError when there are too few."""
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

    def spec(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None
    ) -> PartitionSpec:
        """Placement of logical ``axes``. Where ``shape`` is given, a dim that its mesh axis does
        not divide is replicated (a kv head shared by several chips, an odd vocabulary)."""
        names = [RULES[axis] if axis else None for axis in axes]
        if shape is not None:
            names = [
                name if name and dim % self.mesh.shape[name] == 0 else None
                for name, dim in zip(names, shape, strict=True)
            ]
        return PartitionSpec(*names)

    def of(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None
    ) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape))
