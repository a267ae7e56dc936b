"""Qwen3-8B, thinking off, after the DFlash paper: 5 layers, 5 taps, b = 16.

    python -m train qwen3-8b --data answers/answers-*.jsonl --evaluation eval.jsonl \\
        --work out/qwen3-8b --fsdp-size 16 --stage train --distributed

Hardware and time: not run in full. The step, compiled for TPUs without having any (`python -m train
plan`, 64 rows of 3072), needs 17.6 of 32 GB a chip on v6e:4x4 (fsdp 16) and 4.9 of 95 GB on
v5p:4x4x4 (fsdp 64). Answers: as for qwen3-4b. Expected tau, greedy (the paper, arXiv 2602.06036):
GSM8K 6.54, HumanEval 6.50, MT-Bench 4.24; independent trainings have reached 3.9 to 5.3 on GSM8K.
"""

import dataclasses

from train.recipes.qwen3_4b import QWEN3_4B

assert QWEN3_4B.shape is not None

QWEN3_8B = dataclasses.replace(
    QWEN3_4B,
    name="qwen3-8b",
    target="Qwen/Qwen3-8B",
    shape=dataclasses.replace(
        QWEN3_4B.shape, hidden_size=4096, intermediate_size=12_288, tie_word_embeddings=False
    ),
)
