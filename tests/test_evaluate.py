"""tau by real decoding, with and without loops, against a count by hand."""

import dataclasses
from itertools import accumulate

import pytest
from tiny_model import write_model

import dflash_jax
from dflash_jax import LLM, EngineConfig, Request, SamplingParams
from dflash_jax.statistics import loop_start
from train.evaluate import evaluate

PROMPTS = ["the cat", "and the hat", "hat cat the and", "x"]
ENGINE = EngineConfig(
    max_num_seqs=2, max_model_len=96, prefill_tokens=32, batch_buckets=(2,), seed=0
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return dflash_jax.load(*write_model(tmp_path_factory.mktemp("evaluate")), engine=ENGINE)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_against_a_count_by_hand(llm: LLM, temperature: float) -> None:
    sampling = SamplingParams(temperature, max_new_tokens=40, ignore_eos=True)
    result = evaluate(llm, PROMPTS, sampling)
    raw_tokens = raw_cycles = tokens = cycles = loops = 0
    accepted: list[int] = []
    for seed, text in enumerate(PROMPTS):
        ids = llm.encode([{"role": "user", "content": text}])
        llm.engine.add(Request("one", ids, dataclasses.replace(sampling, seed=seed)))
        updates = list(llm.engine.run())
        output = [token for update in updates for token in update.tokens]
        counts = [u.committed for u in updates if u.committed is not None]
        raw_tokens, raw_cycles = raw_tokens + len(output) - 1, raw_cycles + len(counts)
        loop = loop_start(output)
        loops += loop is not None
        kept = len(output) - 1 if loop is None else loop - 1  # without prefill's token
        used = sum(
            end - count < kept for count, end in zip(counts, accumulate(counts), strict=True)
        )
        tokens, cycles = tokens + max(kept, 0), cycles + used
        accepted += [count - 1 for count in counts[:used]]
    assert (result.prompts, result.tokens) == (4, 160)
    assert result.raw_tau == raw_tokens / raw_cycles
    assert result.tau == tokens / max(cycles, 1)
    assert result.looping == loops / 4
    if temperature == 0:
        assert loops, "greedy answers of a tiny model loop"
        assert result.tau != result.raw_tau
    above = [sum(a > k for a in accepted) / len(accepted) for k in range(len(result.acceptance))]
    assert result.acceptance == above
    assert result.json()["tau"] == result.tau and result.seconds > 0


def test_no_prompts(llm: LLM) -> None:
    result = evaluate(llm, [], SamplingParams())
    assert (result.tau, result.raw_tau, result.looping, result.acceptance) == (0, 0, 0, [])


def test_a_prompt_that_does_not_fit_is_an_error_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(ValueError, match="at most 95 fit a context of 96"):
        evaluate(llm, ["the cat", "x" * 200], SamplingParams())
    assert not llm.engine.has_work
