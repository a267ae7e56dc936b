"""A target that a recipe trains itself: from the standard library's text to an HF folder."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp

from dflash_jax.checkpoint import export_target
from dflash_jax.config import TargetConfig
from dflash_jax.decoder import Pair
from dflash_jax.sharding import Sharding
from train.byte_tokenizer import byte_stream, byte_tokenizer
from train.language_model import LanguageModelConfig, train_language_model
from train.questions import Question
from train.standard_library import StandardLibrary


@dataclasses.dataclass(frozen=True)
class TargetRecipe:
    """A byte-level target, and the questions that go with it: passages to be continued.

    ``questions`` passages of ``passage_bytes`` bytes are asked for the draft's sake, and as long
    ones, ``held_out`` of them, judge it; neither come from files that the target has read.
    """

    config: TargetConfig
    text: StandardLibrary
    language_model: LanguageModelConfig
    questions: int
    held_out: int
    passage_bytes: int

    def __post_init__(self):
        for name in ("questions", "held_out", "passage_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"target.{name} must be at least 1, got {getattr(self, name)}")

    def inputs(self) -> tuple[list[Question], list[Question]]:
        """(questions, held-out questions)."""
        return (
            self.text.questions("asked", self.questions, self.passage_bytes),
            self.text.questions("held out", self.held_out, self.passage_bytes),
        )


def make_target(
    recipe: TargetRecipe, folder: Path, sharding: Sharding, report: Callable[[str], None] = print
) -> None:
    """Train the target and write it with its tokenizer: a folder that ``dflash_jax.load``, our
    server and transformers open. Float32 throughout: it is small."""
    pair = Pair.of(recipe.config, None, sharding, jnp.dtype(jnp.float32))
    stream = byte_stream(recipe.text.texts("read"))
    report(f"target: {len(stream)} bytes of {recipe.text.name}")
    params = train_language_model(pair, stream, recipe.language_model, report=report)
    export_target(folder, recipe.config, params, jnp.float32)
    byte_tokenizer(recipe.config.max_position_embeddings).save_pretrained(folder)
