"""What a recipe states."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dflash_jax.checkpoint import draft_config_json
from dflash_jax.config import DraftConfig, TargetConfig, default_target_layer_ids
from dflash_jax.engine import EngineConfig
from dflash_jax.generate import DType
from dflash_jax.hf_config import draft_config
from dflash_jax.request import SamplingParams
from dflash_jax.speculative import DraftSampling
from train.loop import LoopConfig
from train.target import TargetRecipe


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A draft to train: its shape, its data and its schedule.

    ``target``: a path or Hub id, None for the embedded target, or how to train one first.
    ``initial``: random weights, or the target's last layers. ``intermediate_size`` and
    ``max_position_embeddings``: None takes the target's. ``self_written``: user turns that the
    target writes itself, beside the given prompts. ``answers``: the settings under which the target
    answers, each for an equal share of the prompts. ``template_variables``: of the chat template,
    in answers and evaluation. ``engine`` writes answers, ``evaluation`` decodes up to
    ``evaluation_tokens`` under every combination of the ``evaluated_*``. ``row_length``: tokens of
    a packed training row. ``dtype``: of the target, of the draft's products and of
    the exported draft. ``held_out_share``: of the samples, to choose the best checkpoint by.
    """

    name: str
    target: TargetRecipe | str | None
    initial: Literal["random", "target"]
    num_layers: int
    intermediate_size: int | None
    num_taps: int
    block_size: int
    mask_token_id: int
    max_position_embeddings: int | None
    self_written: int
    answers: tuple[SamplingParams, ...]
    engine: EngineConfig
    evaluation: EngineConfig
    row_length: int
    loop: LoopConfig
    dtype: DType = "bfloat16"
    shape: TargetConfig | None = None
    template_variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    held_out_share: float = 0.0
    evaluated_blocks: tuple[int, ...] = (16, 8, 4)
    evaluated_temperatures: tuple[float, ...] = (0.0, 1.0)
    evaluated_sampling: tuple[DraftSampling, ...] = ("coupled",)
    evaluation_tokens: int = 256
    evaluate_untrained: bool = False

    def __post_init__(self):
        if self.loop.objective.anchors > self.row_length:
            raise ValueError(
                f"objective.anchors {self.loop.objective.anchors} cannot be more than row_length "
                f"{self.row_length}"
            )
        if self.self_written < 0:
            raise ValueError(f"self_written must be at least 0, got {self.self_written}")
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share must be in [0, 1), got {self.held_out_share}")
        if self.evaluated_blocks and max(self.evaluated_blocks) > self.block_size:
            raise ValueError(
                f"evaluated_blocks {self.evaluated_blocks} cannot be more than block_size "
                f"{self.block_size}"
            )
        if self.evaluated_blocks and min(self.evaluated_blocks) < 1:
            raise ValueError(f"evaluated_blocks {self.evaluated_blocks} must be at least 1")
        for temperature in self.evaluated_temperatures:
            SamplingParams(temperature, max_new_tokens=self.evaluation_tokens)

    def draft_config(self, target: TargetConfig) -> DraftConfig:
        """The draft: the target's widths and heads, this recipe's depth and ffn.

        Raises ValueError where the mask token is none of the target's, or where what is exported
        could not be loaded.
        """
        if not 0 <= self.mask_token_id < target.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is not in the target's vocabulary, "
                f"0..{target.vocab_size - 1}"
            )
        full = (None,) * self.num_layers
        ffn, longest = self.intermediate_size, self.max_position_embeddings
        config = DraftConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size if ffn is None else ffn,
            num_layers=self.num_layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            max_position_embeddings=target.max_position_embeddings if longest is None else longest,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=default_target_layer_ids(target.num_layers, self.num_taps),
            num_target_layers=target.num_layers,
            target_hidden_size=target.hidden_size,
            windows=full,
            causal=(False,) * self.num_layers,
        )
        return draft_config(draft_config_json(config, self.dtype), target)
