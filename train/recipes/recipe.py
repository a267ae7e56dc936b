"""What a recipe states."""

import dataclasses
from typing import Literal

from dflash_jax.config import DraftConfig, TargetConfig, default_target_layer_ids
from dflash_jax.engine import EngineConfig
from dflash_jax.request import SamplingParams
from train.loop import LoopConfig
from train.target import TargetRecipe


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A draft to train: its shape, its data and its schedule.

    ``target``: a path or Hub id, None for the embedded target, or how to train one first.
    ``initial``: random weights, or the target's last layers. ``self_written``: user turns that the
    target writes itself, beside the given prompts. ``answers``: the settings under which the target
    answers, each for an equal share of the prompts. ``engine`` writes answers, ``evaluation``
    decodes. ``row_length``: tokens of a packed training row.
    """

    name: str
    target: TargetRecipe | str | None
    initial: Literal["random", "target"]
    num_layers: int
    intermediate_size: int
    num_taps: int
    block_size: int
    mask_token_id: int
    max_position_embeddings: int
    self_written: int
    answers: tuple[SamplingParams, ...]
    engine: EngineConfig
    evaluation: EngineConfig
    row_length: int
    loop: LoopConfig

    def draft_config(self, target: TargetConfig) -> DraftConfig:
        """The draft: the target's widths and heads, this recipe's depth and ffn."""
        full = (None,) * self.num_layers
        return DraftConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            max_position_embeddings=self.max_position_embeddings,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=default_target_layer_ids(target.num_layers, self.num_taps),
            num_target_layers=target.num_layers,
            target_hidden_size=target.hidden_size,
            windows=full,
            causal=(False,) * self.num_layers,
        )
