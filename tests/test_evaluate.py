"""tau by real decoding, with and without loops, against a count by hand."""

import dataclasses
import itertools
import json
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest
from tiny_model import write_model

import dflash_jax
from dflash_jax import LLM, EngineConfig, Request, SamplingParams
from dflash_jax.statistics import loop_start
from train.evaluate import (
    EvaluationFile,
    Setting,
    evaluate,
    evaluate_settings,
    settings_of,
    untrained,
)
from train.questions import Question

TEXTS = ["the cat", "and the hat", "hat cat the and", "x"]
QUESTIONS = [Question.of_text(f"q{i}", f"source{i % 2}", text) for i, text in enumerate(TEXTS)]
ENGINE = EngineConfig(
    max_num_seqs=2, max_model_len=96, prefill_tokens=512, batch_buckets=(2,), seed=0
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_model(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def llm(model: tuple[Path, Path]) -> LLM:
    return dflash_jax.load(*model, engine=ENGINE)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_against_a_count_by_hand(llm: LLM, temperature: float) -> None:
    sampling = SamplingParams(temperature, max_new_tokens=40, ignore_eos=True)
    result = evaluate(llm, QUESTIONS, sampling)
    raw_tokens = raw_cycles = tokens = cycles = loops = 0
    accepted: list[int] = []
    for question in QUESTIONS:
        ids = llm.encode(question.messages)
        seeded = dataclasses.replace(sampling, seed=question.seed(0))
        llm.engine.add(Request("one", ids, seeded))
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
    assert (result.questions, result.tokens) == (4, 160)
    assert result.raw_tau == raw_tokens / raw_cycles
    assert result.tau == tokens / max(cycles, 1)
    assert result.looping == loops / 4
    if temperature == 0:
        assert loops, "greedy answers of a tiny model loop"
        assert result.tau != result.raw_tau
    above = [sum(a > k for a in accepted) for k in range(15)]
    assert result.acceptance == [n / len(accepted) for n in above]
    for k, share in enumerate(result.reached_acceptance):
        reached = [a for a in accepted if a >= k]
        assert share == (above[k] / len(reached) if reached else None)
    assert result.histogram == dict(sorted(Counter(a + 1 for a in accepted).items()))
    assert result.tokens_per_second == result.tokens / result.seconds > 0


def test_no_questions(llm: LLM) -> None:
    result = evaluate(llm, [], SamplingParams())
    assert (result.tau, result.raw_tau, result.looping, result.histogram) == (0, 0, 0, {})
    assert result.acceptance == [0.0] * 15 and result.reached_acceptance == [None] * 15


def test_a_question_that_does_not_fit_is_an_error_and_leaves_nothing(llm: LLM) -> None:
    long = Question.of_text("long", "s", "x" * 200)
    with pytest.raises(ValueError, match="question .long.: .*at most 95 fit a context of 96"):
        evaluate(llm, [QUESTIONS[0], long], SamplingParams())
    assert not llm.engine.has_work


def test_settings_that_decode_alike_are_run_once() -> None:
    settings = list(settings_of([1, 4], [0.0, 1.0], ["coupled", "argmax"]))
    assert settings == [
        Setting(1, 0.0, "coupled"),
        Setting(1, 1.0, "coupled"),
        Setting(4, 0.0, "coupled"),
        Setting(4, 1.0, "coupled"),
        Setting(4, 1.0, "argmax"),
    ]


def test_settings_by_source_beside_an_untrained_draft(llm: LLM) -> None:
    settings = list(settings_of([4], [0.0, 0.6], ["coupled"]))
    run = {
        label: list(
            evaluate_settings(pair, QUESTIONS, settings, ENGINE, max_new_tokens=20, label=label)
        )
        for label, pair in {"trained": llm, "untrained": untrained(llm, 3)}.items()
    }
    for label, results in run.items():
        assert [(r["label"], r["source"], r["block_size"], r["temperature"]) for r in results] == [
            (label, source, 4, t) for t in (0.0, 0.6) for source in ("source0", "source1")
        ]
        assert all(r["questions"] == 2 and len(r["acceptance"]) == 3 for r in results)
    trained, baseline = run.values()
    assert [r["tokens"] for r in trained] == [r["tokens"] for r in baseline], "the target's"
    assert sum(r["raw_tau"] for r in trained) > sum(r["raw_tau"] for r in baseline)


def test_the_file_is_whole_after_every_result(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    file = EvaluationFile(path, {"target": "t"})
    for count in (1, 2):
        file.add({"tau": count})
        content = json.loads(path.read_text())
        assert [r["tau"] for r in content["results"]] == [1, 2][:count]
    assert content["settings"]["target"] == "t" and content["settings"]["versions"]["jax"]
    assert content["settings"]["devices"] and list(tmp_path.iterdir()) == [path]


# The command


@pytest.fixture
def command(model: tuple[Path, Path], tmp_path: Path, compilation_cache: list[str], run_command):
    """Runs ``evaluate`` with other flags; (status, stdout, stderr)."""
    questions = tmp_path / "evaluation.jsonl"
    lines = [{"id": f"q{i}", "source": f"source{i % 2}", "text": "cat"} for i in range(4)]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = {"--target": model[0], "--draft": model[1], "--evaluation": questions}
    # The shapes of ENGINE, which are compiled already.
    own |= {"--dtype": "float32", "--batch": 2, "--max-model-len": 96, "--max-new-tokens": 8}

    def run(flags: dict[str, object], *switches: str) -> tuple[object, str, str]:
        given = {k: v for k, v in (own | flags).items() if v is not None}
        argv = [str(part) for part in itertools.chain(*given.items())]
        return run_command("evaluate", [*argv, *switches, *compilation_cache])

    return run


def test_the_command(command, tmp_path: Path) -> None:
    out = tmp_path / "made" / "out"
    several = ["--block-size", "1", "4", "--temperature", "0", "--draft-sampling", "coupled"]
    status, printed, _ = command({"--out": out}, *several, "argmax", "--untrained")
    assert status == 0 and printed.endswith(f"wrote {out / 'evaluation.json'}\n")
    content = json.loads((out / "evaluation.json").read_text())
    assert [(r["label"], r["block_size"], r["source"]) for r in content["results"]] == [
        ("trained", 1, "source0"), ("trained", 1, "source1"),
        ("trained", 4, "source0"), ("trained", 4, "source1"),
        ("untrained", 4, "source0"), ("untrained", 4, "source1"),
    ]  # fmt: skip
    assert all(r["tau"] == 1.0 for r in content["results"][:2]), "b = 1 is plain decoding"
    assert content["settings"]["dtype"] == "float32" and content["settings"]["seed"] == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"--block-size": 0}, "--block-size must be at least 1, got 0"),
        ({"--block-size": 99}, "--block-size must be in 1..16 (the draft was trained with 16"),
        ({"--block-size": "x"}, "invalid int value: 'x'"),
        ({"--temperature": -1}, "temperature must be a number from 0 to 100"),
        ({"--draft-sampling": "greedy"}, "invalid choice: 'greedy'"),
        ({"--draft": None}, "give --draft with --target"),
        ({"--draft": "no/draft"}, "no/draft"),
        ({"--evaluation": None}, "required: --evaluation"),
        ({"--evaluation": "no.jsonl"}, "no.jsonl is no file"),
        ({"--max-new-tokens": 96}, "has no room for a prompt"),
    ],
)
def test_what_cannot_be_is_said_and_leaves_nothing(command, tmp_path: Path, flags, reason) -> None:
    status, _, error = command({"--out": tmp_path / "out"} | flags)
    assert status == 2 and reason in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()
