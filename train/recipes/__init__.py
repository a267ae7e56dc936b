"""One frozen dataclass file a recipe; ``python -m train NAME`` runs it."""

from train.recipes.recipe import Recipe
from train.recipes.smollm2 import SMOLLM2

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (SMOLLM2,)}

__all__ = ["RECIPES", "Recipe"]
