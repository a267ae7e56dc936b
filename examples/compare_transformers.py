"""Tokens per second of the embedded pair, beside transformers' generate over the same weights.

    pip install -e ".[parity]"                        # torch, from a checkout
    python examples/compare_transformers.py           # five prompts, 128 tokens: some minutes

One run, one machine, float32, greedy, one prompt at a time; the contestants take turns at every
prompt, so that a machine that slows down slows all of them. Each has run once before it is timed.
Plain decoding and DFlash must give the same tokens (but for near-ties of the two best, which are
counted); transformers' are compared and the equal ones counted. The last line is one JSON object.
"""

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import dflash_jax
from dflash_jax import LLM, EngineConfig, SamplingParams
from dflash_jax.checkpoint import open_source
from dflash_jax.config import TargetConfig
from dflash_jax.embedded import fetch_target
from dflash_jax.statistics import cut_cycles
from dflash_jax.testing import Tally, assert_same_tokens

BLOCK_SIZES = (4, 8, 16)
PROMPTS = (
    "What is 17 + 25? Answer step by step, then count from 1 to 20.",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List the planets of the solar system from the sun outwards, with one fact about each.",
    "Tom has 3 boxes of 12 pencils and gives away 7 pencils. How many has he left?",
)


@dataclasses.dataclass
class Contestant:
    """``decode``: prompt ids -> (new ids, steps that made all but the first of them)."""

    name: str
    decode: Callable[[tuple[int, ...]], tuple[list[int], int]]
    seconds: float = 0.0
    steps: int = 0
    outputs: list[list[int]] = dataclasses.field(default_factory=list)

    def take_turn(self, prompt: tuple[int, ...]) -> None:
        started = time.perf_counter()
        output, steps = self.decode(prompt)
        self.seconds += time.perf_counter() - started
        self.steps += steps
        self.outputs.append(output)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds

    @property
    def tau(self) -> float:
        return sum(len(output) - 1 for output in self.outputs) / max(self.steps, 1)


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens)
    engine = EngineConfig(max_num_seqs=1, max_model_len=1024)
    llm = dflash_jax.load(dtype="float32", engine=engine)
    prompts = [llm.encode([{"role": "user", "content": text}]) for text in PROMPTS]
    no_draft = dataclasses.replace(engine, speculation=False)
    plain = Contestant("plain", _ours(llm, no_draft, sampling))
    dflash = [
        Contestant(
            f"DFlash, b = {b}", _ours(llm, dataclasses.replace(engine, block_size=b), sampling)
        )
        for b in options.block_sizes
    ]
    contestants = [Contestant("transformers", _theirs(llm, options.max_new_tokens)), plain, *dflash]

    print(f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads;"
          f" jax {jax.__version__} on {jax.default_backend()}, torch {torch.__version__},"
          f" transformers {transformers.__version__}")  # fmt: skip
    for contestant in contestants:
        for prompt in prompts:  # every prompt: their lengths are shapes, and shapes compile
            contestant.decode(prompt)
    for prompt in prompts:
        for contestant in contestants:
            contestant.take_turn(prompt)

    tally = Tally()
    for contestant in dflash:
        for prompt, expected, got in zip(prompts, plain.outputs, contestant.outputs, strict=True):
            assert_same_tokens(llm.pair, llm.engine.params, prompt, sampling, expected, got, tally)
    print(f"{'':16}{'tok/s':>8}{'tau':>7}{'x transformers':>16}{'x plain':>9}  outputs equal")
    rows = [_row(c, contestants[0], plain) for c in contestants]
    print(json.dumps({
        "machine": platform.machine(), "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(), "backend": jax.default_backend(),
        "jax": jax.__version__, "torch": torch.__version__,
        "transformers": transformers.__version__, "model": llm.name, "dtype": "float32",
        "prompts": len(prompts), "max_new_tokens": options.max_new_tokens,
        "near_ties": len(tally.excused), "rows": rows,
    }))  # fmt: skip
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=list(BLOCK_SIZES))
    parser.add_argument("--threads", type=int, help="of torch (default: all cores)")
    return parser.parse_args()


def _ours(
    llm: LLM, config: EngineConfig, sampling: SamplingParams
) -> Callable[[tuple[int, ...]], tuple[list[int], int]]:
    mine = llm.with_engine(config)

    def decode(prompt: tuple[int, ...]) -> tuple[list[int], int]:
        result = mine.generate(prompt, sampling)
        # generate() runs one token more than it emits; a cycle for that one alone is left out.
        cycles = result.statistics.tokens_per_cycle
        return result.output_ids, cut_cycles(cycles, len(result.output_ids) - 1)[1]

    return decode


def _theirs(llm: LLM, max_new_tokens: int) -> Callable[[tuple[int, ...]], tuple[list[int], int]]:
    config = llm.pair.target_config
    with tempfile.TemporaryDirectory() as folder:
        write_target(Path(folder), config)
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def decode(prompt: tuple[int, ...]) -> tuple[list[int], int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=list(config.eos_token_ids),
                pad_token_id=config.eos_token_ids[0],
            )
        new = output[0, len(prompt) :].tolist()
        return new, len(new) - 1

    return decode


def write_target(folder: Path, config: TargetConfig) -> None:
    """The embedded target as an HF folder in float32: the very numbers that we run."""
    source = open_source(fetch_target())
    tensors = {name: np.ascontiguousarray(source.read(name)) for name in source.shapes()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope.theta,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=list(config.eos_token_ids),
    ).save_pretrained(folder)


def _row(contestant: Contestant, theirs: Contestant, plain: Contestant) -> dict[str, object]:
    """Print a line of the table, and give it back for the JSON."""
    rate = contestant.tokens_per_second
    same = _equal(contestant.outputs, plain.outputs)
    over_theirs, over_plain = rate / theirs.tokens_per_second, rate / plain.tokens_per_second
    print(f"{contestant.name:16}{rate:8.1f}{contestant.tau:7.2f}{over_theirs:16.2f}{over_plain:9.2f}"
          f"  {same}/{len(plain.outputs)}")  # fmt: skip
    return {
        "name": contestant.name,
        "tokens_per_second": rate,
        "tau": contestant.tau,
        "over_transformers": over_theirs,
        "over_plain": over_plain,
        "outputs_equal_to_plain": same,
    }


def _equal(outputs: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    return sum(a == b for a, b in zip(outputs, others, strict=True))


if __name__ == "__main__":
    sys.exit(main())
