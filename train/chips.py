"""Accelerators by JAX's name for them: their memory, and what their matmul units can do.

Sources: Google Cloud's pages of TPU versions (cloud.google.com/tpu/docs), NVIDIA's data sheets of
the H100 SXM and the H200 SXM (dense figures: half of those with sparsity).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """``hbm_bytes`` as the data sheet has it; ``peak_flops``: dense bfloat16 FLOPs a second."""

    name: str
    hbm_bytes: int
    peak_flops: float


GB = 10**9
CHIPS: dict[str, Chip] = {
    "TPU v5 lite": Chip("v5e", 16 * GB, 197e12),
    "TPU v5": Chip("v5p", 95 * GB, 459e12),
    "TPU v5p": Chip("v5p", 95 * GB, 459e12),
    "TPU v6 lite": Chip("v6e", 32 * GB, 918e12),
    "TPU v6e": Chip("v6e", 32 * GB, 918e12),
    "NVIDIA H100": Chip("H100", 80 * GB, 989e12),
    "NVIDIA H200": Chip("H200", 141 * GB, 989e12),
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip that ``jax.Device.device_kind`` names; None for one that is not in the table."""
    # "NVIDIA H100 80GB HBM3": the longest name that it begins with.
    names = [name for name in CHIPS if f"{device_kind} ".startswith(f"{name} ")]
    return CHIPS[max(names, key=len)] if names else None
