"""Packed rows: the shape of a training batch."""

import dataclasses

import jax
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Documents packed into rows. ``segments``: document number within the row from 1, 0 is
    padding. ``positions`` count from each document's start. ``loss_mask``: supervised tokens."""

    tokens: Int[Array, "Z S"]
    segments: Int[Array, "Z S"]
    positions: Int[Array, "Z S"]
    loss_mask: Bool[Array, "Z S"]
