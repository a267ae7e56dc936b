"""The goldens: numbers of the reference implementations, reproduced."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import dflash_jax
from dflash_jax import LLM, EngineConfig
from dflash_jax.testing import draft_oracle, target_oracle

GOLDENS = Path(__file__).parent / "goldens"
NAMES = ["llama-scaled", "qwen3-tied-b16", "qwen3-untied"]
# Both sides are float32 and agree to 1e-5; a wrong mask or tap is off by 1e-1.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, list[dict], dict]]:
    folder = GOLDENS / request.param
    engine = EngineConfig(max_num_seqs=1, prefill_tokens=32)
    llm = dflash_jax.load(folder / "target", folder / "draft", engine=engine)
    cases = json.loads((folder / "golden.json").read_text())["cases"]
    yield llm, cases, load_file(folder / "golden.safetensors")


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("case", range(4))
def test_target_logits_and_features(golden, case: int) -> None:
    """Faults 17 (tap off by one), 19, 20, 25: layout, RoPE and head are the checkpoint's."""
    llm, _, numbers = golden
    prompt = numbers[f"{case}.prompt"].tolist()
    logits, features = target_oracle(llm.pair, llm.engine.params, prompt)
    assert_close(logits, numbers[f"{case}.target_logits"])
    assert_close(features, numbers[f"{case}.target_features"])


@pytest.mark.parametrize("case", range(4))
def test_first_block(golden, case: int) -> None:
    """The draft's logits for [first greedy token, MASK, ...] at the prompt's end."""
    llm, _, numbers = golden
    prompt = numbers[f"{case}.prompt"].tolist()
    anchor = int(numbers[f"{case}.output"][len(prompt)])
    block_size = llm.pair.draft_config.block_size
    logits = draft_oracle(llm.pair, llm.engine.params, [*prompt, anchor], block_size)
    assert_close(logits, numbers[f"{case}.first_block_logits"])


@pytest.mark.parametrize("case", range(4))
def test_output_and_tokens_per_cycle(golden, case: int) -> None:
    """The same tokens in the same cycles: no acceptance is lost anywhere."""
    llm, cases, numbers = golden
    prompt = numbers[f"{case}.prompt"].tolist()
    expected = cases[case]
    result = llm.generate(prompt, max_new_tokens=expected["max_new_tokens"], ignore_eos=True)
    assert prompt + result.output_ids == numbers[f"{case}.output"].tolist()
    assert result.statistics.tokens_per_cycle == expected["tokens_committed_per_step"]
    assert result.finish_reason == "length"
