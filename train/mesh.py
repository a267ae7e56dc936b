"""The mesh of training: data x fsdp x model.

Rows are split over data and fsdp together. Weights, masters and optimiser state are split over
model by heads, ffn and vocabulary, as in decoding, and over fsdp by the model dim; a layer's
weights are gathered over fsdp where they are used.
"""

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from dflash_jax.sharding import RULES, Rules, Sharding

TRAINING_RULES: Rules = {**RULES, "rows": ("data", "fsdp"), "embed": "fsdp"}


def training_sharding(data: int = 0, fsdp: int = 1, model: int = 1, devices=None) -> Sharding:
    """A sharding over data * fsdp * model devices; data 0 takes all there are.

    Raises ValueError where the devices do not fill the mesh.
    """
    devices = jax.devices() if devices is None else devices
    if data < 0 or fsdp < 1 or model < 1:
        raise ValueError(f"mesh sizes must be at least 1, got {data} x {fsdp} x {model}")
    data = data or max(len(devices) // (fsdp * model), 1)
    count = data * fsdp * model
    if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        raise ValueError(
            f"a {data} x {fsdp} x {model} (data x fsdp x model) mesh needs {count} devices, "
            f"found {len(devices)} of platform {devices[0].platform}"
        )
    # Neighbours on the chips' own network become neighbours on an axis; an axis of the network is
    # split between two of the mesh where that is the only way (32 of v5p:4x4x4).
    grid = mesh_utils.create_device_mesh(
        (data, fsdp, model), devices=devices[:count], allow_split_physical_axes=True
    )
    return Sharding(
        Mesh(grid, ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3), TRAINING_RULES
    )


def row_shards(sharding: Sharding) -> int:
    """Over how many devices the rows of a batch are split."""
    return sharding.mesh.shape["data"] * sharding.mesh.shape["fsdp"]
