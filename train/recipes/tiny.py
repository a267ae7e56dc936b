"""A whole small run on two CPU cores: a byte-level target, its answers, its draft."""

from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.engine import EngineConfig
from dflash_jax.request import SamplingParams
from train.byte_tokenizer import END, MASK, VOCAB_SIZE
from train.language_model import LanguageModelConfig
from train.loop import LoopConfig
from train.losses import LossConfig
from train.objective import ObjectiveConfig
from train.recipes.recipe import Recipe
from train.standard_library import StandardLibrary
from train.step import OptimizerConfig
from train.target import TargetRecipe

ANSWER = 96  # tokens

TINY = Recipe(
    name="tiny",
    target=TargetRecipe(
        config=TargetConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=384,
            num_layers=2,
            num_heads=4,
            num_kv_heads=4,
            head_dim=32,
            rms_norm_eps=1e-6,
            rope=RopeConfig(theta=1e4),
            max_position_embeddings=2048,
            architecture="qwen3",
            tie_word_embeddings=False,
            qk_norm=True,
            eos_token_ids=(END,),
        ),
        text=StandardLibrary("encodings"),
        language_model=LanguageModelConfig(
            batch_rows=8, row_length=256, learning_rate=1e-2, steps=250
        ),
        prompts=512,
        held_out=32,
        prompt_bytes=96,
    ),
    initial="target",
    num_layers=2,
    intermediate_size=384,
    num_taps=2,
    block_size=8,
    mask_token_id=MASK,
    max_position_embeddings=2048,
    self_written=0,
    answers=(
        SamplingParams(temperature=0.0, max_new_tokens=ANSWER),
        SamplingParams(temperature=1.0, max_new_tokens=ANSWER),
        SamplingParams(temperature=1.0, max_new_tokens=ANSWER),
        SamplingParams(temperature=1.0, max_new_tokens=ANSWER),
    ),
    engine=EngineConfig(
        max_num_seqs=64, max_model_len=256, prefill_tokens=4096, batch_buckets=(64,), seed=1
    ),
    evaluation=EngineConfig(
        max_num_seqs=32, max_model_len=256, prefill_tokens=4096, batch_buckets=(32,)
    ),
    row_length=192,
    loop=LoopConfig(
        objective=ObjectiveConfig(anchors=32, loss=LossConfig(gamma=4.0, kl=1.0)),
        batch_rows=8,
        optimizer=OptimizerConfig(learning_rate=3e-3),
        steps=200,
    ),
)
