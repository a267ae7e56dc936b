"""Llama-3.1-8B-Instruct, after the DFlash paper: 5 layers, 5 taps, b = 10.

    python -m train regenerate --target meta-llama/Llama-3.1-8B-Instruct --prompts prompts.jsonl \\
        --out answers --temperature 0.6 --top-p 0.9 \\
        --chat-template-kwargs '{"date_string": "26 Jul 2024"}'
    python -m train llama3.1-8b --data answers/answers-*.jsonl --evaluation eval.jsonl \\
        --work out/llama3.1-8b --fsdp-size 8

Hardware and time: not run in full here.
Expected tau: the paper gives no figure for it that was copied here.
"""

import dataclasses

from dflash_jax.config import RopeConfig
from dflash_jax.request import SamplingParams
from train.losses import LossConfig
from train.objective import ObjectiveConfig
from train.recipes.qwen3_4b import QWEN3_4B

assert QWEN3_4B.shape is not None

LLAMA3_1_8B = dataclasses.replace(
    QWEN3_4B,
    name="llama3.1-8b",
    target="meta-llama/Llama-3.1-8B-Instruct",
    shape=dataclasses.replace(
        QWEN3_4B.shape,
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            theta=5e5,
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        max_position_embeddings=131_072,
        architecture="llama",
        tie_word_embeddings=False,
        qk_norm=False,
        eos_token_ids=(128_001, 128_008, 128_009),
        bos_token_id=128_000,
    ),
    block_size=10,
    mask_token_id=128_002,  # <|reserved_special_token_0|>: chat never uses it
    evaluated_blocks=(10, 8, 4),
    answers=(SamplingParams(temperature=0.6, top_p=0.9, max_new_tokens=2048),),
    # The template dates its system prompt; a fixed date keeps data and contract the same.
    template_variables={"date_string": "26 Jul 2024"},
    loop=dataclasses.replace(
        QWEN3_4B.loop,
        objective=ObjectiveConfig(anchors=512, loss=LossConfig(gamma=5.0), remat=True),
    ),
)
