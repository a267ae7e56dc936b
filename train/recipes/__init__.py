"""One frozen dataclass file a recipe; ``python -m train NAME`` runs it."""

from train.recipes.llama3_1_8b import LLAMA3_1_8B
from train.recipes.qwen3_4b import QWEN3_4B
from train.recipes.qwen3_8b import QWEN3_8B
from train.recipes.recipe import Recipe
from train.recipes.smollm2 import SMOLLM2
from train.recipes.tiny import TINY

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (TINY, SMOLLM2, QWEN3_4B, QWEN3_8B, LLAMA3_1_8B)
}

__all__ = ["RECIPES", "Recipe"]
