"""Flags of the commands that look at one training step."""

import dataclasses

from dflash_jax.flags import flag
from train.cli.mesh_args import MeshArgs
from train.cli.overrides import with_overrides
from train.recipes import RECIPES, Recipe


@dataclasses.dataclass(frozen=True)
class StepArgs(MeshArgs):
    """A recipe, changes to it, and a mesh."""

    recipe: str = flag("whose step", choices=sorted(RECIPES), metavar="RECIPE")
    override: tuple[str, ...] = flag(
        "change the recipe, such as loop.batch_rows=16 or shape.num_layers=8", "--set",
        default=(), nargs="+", repeated=True, metavar="FIELD=VALUE",
    )  # fmt: skip

    def changed_recipe(self) -> Recipe:
        """Raises ValueError naming a field that is not there."""
        return with_overrides(RECIPES[self.recipe], self.override)
