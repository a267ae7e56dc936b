"""The target's own answers as training data."""

import dataclasses
import json
from pathlib import Path

import pytest
from tiny_model import write_model

import dflash_jax
from dflash_jax import LLM, EngineConfig, Request, SamplingParams
from dflash_jax.statistics import loop_start
from train.prompts import Prompt
from train.regenerate import regenerate, run_all, self_written_prompts
from train.samples import read_samples

TEXTS = ["the cat", "and the hat", "hat cat", "x", "שלום", "the the the"]
PROMPTS = [Prompt(f"p{i}", f"source{i % 2}", text) for i, text in enumerate(TEXTS)]
ENGINE = EngineConfig(
    max_num_seqs=4,
    max_model_len=96,
    prefill_tokens=32,
    speculation=False,
    batch_buckets=(4,),
    seed=0,
)
SAMPLING = SamplingParams(temperature=0.6, seed=3, max_new_tokens=40)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    target, _ = write_model(tmp_path_factory.mktemp("regenerate"))
    return dflash_jax.load(target, engine=ENGINE)


def records(path: Path) -> dict[str, dict]:
    return {r["id"]: r for r in map(json.loads, path.read_text().splitlines())}


@pytest.mark.parametrize("sampling", [SAMPLING, dataclasses.replace(SAMPLING, temperature=0.0)])
def test_answers_are_solo_answers_cut_at_their_loop(llm: LLM, tmp_path: Path, sampling) -> None:
    out = tmp_path / "answers.jsonl"
    written = regenerate(llm, PROMPTS, out, sampling=sampling, report=print)
    answers = records(out)
    looped = 0
    for prompt in PROMPTS:
        ids = llm.encode([{"role": "user", "content": prompt.text}])
        llm.engine.add(Request("solo", ids, sampling))
        solo = [token for update in llm.engine.run() for token in update.tokens]
        loop = loop_start(solo)
        looped += loop is not None
        expected = solo[:loop]
        if len(expected) < 2:  # nothing that a block could learn
            assert prompt.id not in answers
            continue
        answer = answers.pop(prompt.id)
        assert answer["source"] == prompt.source
        assert answer["input_ids"] == [*ids, *expected]
        assert answer["loss_mask"] == [0] * len(ids) + [1] * len(expected)
        written -= len(expected)
    assert not answers and written == 0
    assert looped if sampling.temperature == 0 else looped < len(PROMPTS)
    list(read_samples([out], vocab_size=llm.pair.target_config.vocab_size, max_bad_share=0.0))


def test_prompts_that_do_not_fit_are_skipped_and_counted(llm: LLM, tmp_path: Path) -> None:
    lines: list[str] = []
    prompts = [
        Prompt("long", "s", "x" * 60),
        Prompt("short", "s", "x"),
        Prompt("l2", "s", "y" * 99),
    ]
    regenerate(llm, prompts, tmp_path / "out", sampling=SAMPLING, report=lines.append)
    assert "skipped 2 prompts of over 56 tokens" in lines
    assert set(records(tmp_path / "out")) <= {"short"}


def test_a_spent_budget_starts_nothing(llm: LLM, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert regenerate(llm, PROMPTS, out, sampling=SAMPLING, seconds=-1.0) == 0
    assert out.read_text() == "" and not llm.engine.has_work


def test_later_passes_append(llm: LLM, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for prompt in PROMPTS[:2]:
        regenerate(llm, [prompt], out, sampling=SAMPLING)
    assert set(records(out)) == {"p0", "p1"}


def test_run_all_yields_every_request_once(llm: LLM) -> None:
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
    requests = [Request(f"r{i}", (5 + i, 6), sampling) for i in range(11)]
    answers = list(run_all(llm.engine, requests))
    assert sorted(id for id, _ in answers) == sorted(r.id for r in requests)
    assert {len(ids) for _, ids in answers} == {3} and not llm.engine.has_work


def test_run_all_that_is_left_early_frees_what_it_holds(llm: LLM) -> None:
    sampling = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (2, 30, 30)]
    run = run_all(llm.engine, [Request(f"r{i}", (5,), s) for i, s in enumerate(sampling)])
    assert next(run)[0] == "r0"
    run.close()
    assert not llm.engine.has_work


def test_self_written_prompts_are_whole_turns(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start from the template's own prefix, with one BOS, and end at an EOS."""
    seen: list[Request] = []
    add = llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda request: (seen.append(request), add(request)))
    pair = llm.pair
    ends = tuple(range(0, 288, 12))  # this target hardly ever says its own EOS
    config = dataclasses.replace(pair.target_config, eos_token_ids=ends)
    monkeypatch.setattr(llm.engine, "pair", dataclasses.replace(pair, target_config=config))
    texts = self_written_prompts(llm, 6, seed=4, seconds=60.0)
    assert llm.tokenizer is not None
    prefix = tuple(llm.tokenizer("<s>user: ", add_special_tokens=False)["input_ids"])
    assert prefix.count(1) == 1
    assert [r.prompt_ids for r in seen] == [prefix] * 6
    assert [r.sampling.seed for r in seen] == list(range(4, 10))
    whole = []
    for request in seen:
        add(request)
        ids = [token for update in llm.engine.run() for token in update.tokens]
        if ids[-1] in ends:
            whole.append(llm.tokenizer.decode(ids[:-1]).strip())
    assert whole and sorted(texts) == sorted(whole)
