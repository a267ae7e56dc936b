"""A whole small run on two CPU cores: a byte-level target, its answers, its draft.

    python -m train tiny --work out/tiny

Hardware and time: two cores, about 145 CPU seconds with all compilation: target 65, answers 14,
draft 43, evaluation 20. Expected tau on held-out files, loops aside: 4.0 greedy, 2.9 at T = 1; of
an untrained draft 1.0.

The text is encodings/, tables of characters for the most part and the most regular megabyte of the
library, for two reasons. At T = 1 a block is drafted without knowing the tokens drawn inside it,
so tau is bounded by the text's entropy: after as many steps the target's held-out loss is 0.4 nats
a byte here and 1.4 on the whole library. And a loop is an 8-gram that comes five times, which in
bytes is any passage of indented code (LOG.md has the figures for the whole library).
"""

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

ANSWER = 96  # bytes: lines are about 45, and a byte 8-gram of five lines would count as a loop

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
            batch_rows=8, row_length=256, learning_rate=1e-2, steps=200
        ),
        questions=512,
        held_out=64,
        passage_bytes=96,
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
        max_num_seqs=64, max_model_len=256, prefill_tokens=4096, batch_buckets=(64,)
    ),
    row_length=192,
    loop=LoopConfig(
        # KL, because the target's own distribution is what T = 1 is drawn from.
        objective=ObjectiveConfig(anchors=32, loss=LossConfig(gamma=4.0, kl=1.0)),
        batch_rows=8,
        optimizer=OptimizerConfig("muon", learning_rate=1e-2),
        steps=120,
        checkpoint_every=120,
    ),
    dtype="float32",
    held_out_share=0.03,
    evaluated_blocks=(8,),
    evaluation_tokens=ANSWER,
    evaluate_untrained=True,
)
