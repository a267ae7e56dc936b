"""Flags of the commands that look at one training step."""

import dataclasses

from dflash_jax.flags import flag
from train.cli.recipe import with_overrides
from train.recipes import RECIPES, Recipe


@dataclasses.dataclass(frozen=True)
class StepArgs:
    """A recipe, changes to it, and a mesh."""

    recipe: str = flag("whose step", choices=sorted(RECIPES), metavar="RECIPE")
    override: tuple[str, ...] = flag(
        "change the recipe, such as loop.batch_rows=16 or shape.num_layers=8", "--set",
        default=(), nargs="+", repeated=True, metavar="FIELD=VALUE",
    )  # fmt: skip
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

    def changed_recipe(self) -> Recipe:
        """Raises ValueError naming a field that is not there."""
        return with_overrides(RECIPES[self.recipe], self.override)
