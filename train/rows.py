"""Packed rows: the shape of a training batch."""

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Documents packed into rows. ``segments``: document number within the row from 1, 0 is
    padding. ``positions`` count from each document's start. ``loss_mask``: supervised tokens."""

    tokens: Int[Array, "Z S"]
    segments: Int[Array, "Z S"]
    positions: Int[Array, "Z S"]
    loss_mask: Bool[Array, "Z S"]


class TrainingRows(NamedTuple):
    """``features``: the target's, where a run reads them from disk (features.py)."""

    rows: PackedRows
    features: Float[Array, "Z S nD"] | None
