"""Qwen3-4B, thinking off, after the DFlash paper: 5 layers, 5 taps, b = 16.

    python -m train regenerate --target Qwen/Qwen3-4B --prompts prompts.jsonl --out answers \\
        --temperature 0.7 --top-p 0.8 --top-k 20 --chat-template-kwargs '{"enable_thinking": false}'
    python -m train qwen3-4b --data answers/answers-*.jsonl --evaluation eval.jsonl \\
        --work out/qwen3-4b --fsdp-size 8

Unlike the paper's rows ours are packed: the 512 anchors of a row are shared by its documents, about
three of 1,000 tokens, so an epoch shows each document fewer blocks and costs as much less.

Hardware and time: not run in full. 800,000 samples of about 1,000 tokens, 6 epochs, are 4.8e9
tokens; `python -m train bench qwen3-4b` says what the devices at hand do a second. Expected tau,
greedy (the paper, arXiv 2602.06036): GSM8K 6.53, HumanEval 6.64, MT-Bench 4.35. Independent
trainings reach less; fewer epochs, fewer samples and answers that are not the target's own explain
most of it.
"""

from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.engine import EngineConfig
from dflash_jax.request import SamplingParams
from train.loop import LoopConfig
from train.losses import LossConfig
from train.objective import ObjectiveConfig
from train.recipes.recipe import Recipe
from train.step import OptimizerConfig

QWEN3_4B = Recipe(
    name="qwen3-4b",
    target="Qwen/Qwen3-4B",
    shape=TargetConfig(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        max_position_embeddings=40_960,
        architecture="qwen3",
        tie_word_embeddings=True,
        qk_norm=True,
        eos_token_ids=(151_645,),
    ),
    initial="random",
    num_layers=5,
    intermediate_size=None,
    num_taps=5,
    block_size=16,
    mask_token_id=151_669,
    max_position_embeddings=None,
    self_written=0,
    answers=(SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_new_tokens=2048),),
    template_variables={"enable_thinking": False},  # drafts are mode-specific
    engine=EngineConfig(
        max_num_seqs=256, max_model_len=4096, prefill_tokens=16_384, batch_buckets=(32, 256)
    ),
    evaluation=EngineConfig(
        max_num_seqs=32, max_model_len=4096, prefill_tokens=8192, batch_buckets=(32,)
    ),
    evaluation_tokens=2048,
    row_length=3072,
    held_out_share=0.002,
    loop=LoopConfig(
        objective=ObjectiveConfig(anchors=512, loss=LossConfig(gamma=7.0), remat=True),
        batch_rows=64,
        optimizer=OptimizerConfig(learning_rate=6e-4),
        epochs=6,
        checkpoint_every=1000,
    ),
)
