"""Flags of the commands that run or look at a training step."""

import dataclasses

from dflash_jax.flags import flag


@dataclasses.dataclass(frozen=True)
class MeshArgs:
    """data x fsdp x model."""

    data_parallel_size: int = flag(
        "copies of the weights (default: all devices over the other two)", "--data-parallel-size",
        default=0, type=int,
    )  # fmt: skip
    fsdp_size: int = flag(
        "devices that split weights and optimiser state between them", "--fsdp-size", default=1,
        type=int,
    )  # fmt: skip
    tensor_parallel_size: int = flag(
        "devices that split heads, ffn and vocabulary", "--tensor-parallel-size", default=1,
        type=int,
    )  # fmt: skip

    @property
    def mesh(self) -> tuple[int, int, int]:
        return self.data_parallel_size, self.fsdp_size, self.tensor_parallel_size
