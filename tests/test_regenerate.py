"""The target's own answers as training data, however often a run is begun."""

import dataclasses
import itertools
import json
import random
from pathlib import Path

import pytest
from tiny_model import write_model

import dflash_jax
from dflash_jax import LLM, EngineConfig, Request, SamplingParams
from dflash_jax.statistics import loop_start
from train.answers import skipped_path
from train.questions import Question
from train.regenerate import Written, regenerate, run_all, self_written_prompts
from train.samples import read_samples

TEXTS = ["the cat", "and the hat", "hat cat", "x", "שלום", "the the the"]
QUESTIONS = [Question.of_text(f"p{i}", f"source{i % 2}", text) for i, text in enumerate(TEXTS)]
ENGINE = EngineConfig(
    max_num_seqs=4,
    max_model_len=96,
    prefill_tokens=512,
    speculation=False,
    batch_buckets=(4,),
    seed=0,
)
SAMPLING = SamplingParams(temperature=0.6, seed=3, max_new_tokens=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_model(tmp_path_factory.mktemp("regenerate"))


@pytest.fixture(scope="module")
def llm(model: tuple[Path, Path]) -> LLM:
    return dflash_jax.load(model[0], engine=ENGINE)


def records(path: Path) -> dict[str, dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {record["id"]: record for record in lines}
    assert len(by_id) == len(lines), "an id was written twice"
    return by_id


@pytest.mark.parametrize("sampling", [SAMPLING, dataclasses.replace(SAMPLING, temperature=0.0)])
def test_answers_are_solo_answers_cut_at_their_loop(llm: LLM, tmp_path: Path, sampling) -> None:
    out = tmp_path / "answers.jsonl"
    written = regenerate(llm, QUESTIONS, out, sampling=sampling, conversations=True)
    answers, skipped = records(out), records(skipped_path(out))
    assert (len(answers), len(skipped)) == (written.answers, written.skipped)
    looped = 0
    for question in QUESTIONS:
        ids = llm.encode(question.messages)
        seeded = dataclasses.replace(sampling, seed=question.seed(3))
        llm.engine.add(Request("solo", ids, seeded))
        updates = list(llm.engine.run())
        solo = [token for update in updates for token in update.tokens]
        loop = loop_start(solo)
        looped += loop is not None
        expected = solo[:loop]
        if len(expected) < 2:  # nothing that a block could learn
            assert skipped[question.id]["reason"] == f"an answer of {len(expected)} tokens"
            continue
        answer = answers.pop(question.id)
        assert answer["source"] == question.source
        assert answer["input_ids"] == [*ids, *expected]
        assert answer["loss_mask"] == [0] * len(ids) + [1] * len(expected)
        reason = updates[-1].finish_reason if loop is None else "loop"
        assert answer["finish_reason"] == reason
        assert answer["conversations"][:-1] == question.messages
        assert answer["conversations"][-1]["role"] == "assistant"
        written.tokens -= len(expected)
    assert not answers and written.tokens == 0
    assert looped if sampling.temperature == 0 else looped < len(QUESTIONS)
    list(read_samples([out], vocab_size=llm.pair.target_config.vocab_size, max_bad_share=0.0))


def test_questions_without_an_answer_are_kept_with_their_reason(llm: LLM, tmp_path: Path) -> None:
    tool = Question("tool", "s", [{"role": "tool", "content": "3"}])
    long = Question.of_text("long", "s", "x" * 60)
    out = tmp_path / "out"
    written = regenerate(llm, [long, QUESTIONS[0], tool], out, sampling=SAMPLING)
    reasons = {id: record["reason"] for id, record in records(skipped_path(out)).items()}
    assert reasons == {
        "long": "a prompt of 77 tokens, where 1 to 56 fit",
        "tool": "the chat template refuses these messages: no tools",
    }
    assert (written.answers, written.skipped, written.left) == (1, 2, 0)
    assert regenerate(llm, [long, tool], out, sampling=SAMPLING) == Written(before=2)


def test_template_variables_and_earlier_turns_reach_the_prompt(llm: LLM, tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    question = Question("q", "s", [{"role": r, "content": c} for r, c in turns])
    out = tmp_path / "out"
    regenerate(llm, [question], out, sampling=SAMPLING, template_variables={"loud": True})
    assert llm.tokenizer is not None
    text = str(llm.tokenizer.decode(records(out)["q"]["input_ids"]))
    assert text.startswith("<s>user: a\n<s>assistant: b\n<s>user: c\nLOUD assistant:")


def test_a_spent_budget_starts_nothing(llm: LLM, tmp_path: Path) -> None:
    out = tmp_path / "out"
    written = regenerate(llm, QUESTIONS, out, sampling=SAMPLING, seconds=-1.0)
    assert written == Written(left=6)
    assert out.read_text() == "" and not llm.engine.has_work


def test_resumed_and_sharded_runs_write_what_one_run_writes(llm: LLM, tmp_path: Path) -> None:
    """Whatever was answered before a kill, beside whom, and in which order."""
    whole, out = tmp_path / "whole", tmp_path / "resumed"
    first = regenerate(llm, QUESTIONS, whole, sampling=SAMPLING)
    regenerate(llm, QUESTIONS[3:5], out, sampling=SAMPLING)
    out.write_bytes(out.read_bytes()[:-20])  # killed in the middle of a line
    shuffled = random.Random(0).sample(QUESTIONS, len(QUESTIONS))
    again = regenerate(llm, shuffled, out, sampling=SAMPLING)
    assert again.before == 1 and again.answers == first.answers - 1
    assert records(out) == records(whole)
    shards: dict[str, dict] = {}
    for i in range(2):
        regenerate(llm, QUESTIONS[i::2], tmp_path / f"shard{i}", sampling=SAMPLING)
        shards |= records(tmp_path / f"shard{i}")
    assert shards == records(whole)
    before = out.read_bytes()
    assert regenerate(llm, QUESTIONS, out, sampling=SAMPLING) == Written(before=6)
    assert out.read_bytes() == before


def test_speculation_writes_the_same_answers(
    model: tuple[Path, Path], llm: LLM, tmp_path: Path
) -> None:
    engine = EngineConfig(  # of test_evaluate.py: these programs are compiled once
        max_num_seqs=2, max_model_len=96, prefill_tokens=512, batch_buckets=(2,), block_size=4
    )
    drafted = dflash_jax.load(*model, engine=engine)
    for name, engine in {"plain": llm, "drafted": drafted}.items():
        regenerate(engine, QUESTIONS, tmp_path / name, sampling=SAMPLING)
    assert records(tmp_path / "drafted") == records(tmp_path / "plain")


def test_run_all_yields_every_request_once(llm: LLM) -> None:
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
    requests = [Request(f"r{i}", (5 + i, 6), sampling) for i in range(11)]
    counts: list[int] = []
    answers = list(run_all(llm.engine, requests, on_tokens=counts.append))
    assert sorted(id for id, _, _ in answers) == sorted(r.id for r in requests)
    assert {len(ids) for _, ids, _ in answers} == {3} and not llm.engine.has_work
    assert {reason for _, _, reason in answers} == {"length"} and sum(counts) == 33


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


# The command


@pytest.fixture
def command(model: tuple[Path, Path], tmp_path: Path, compilation_cache: list[str], run_command):
    """Runs ``regenerate`` with more flags; (status, stdout, stderr)."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": q.id, "source": q.source, "text": q.messages[0]["content"]} for q in QUESTIONS]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = {"--target": model[0], "--prompts": prompts, "--dtype": "float32", "--batch": 4}
    own |= {"--max-model-len": 96, "--max-new-tokens": 40}

    def run(*flags: object) -> tuple[object, str, str]:
        given = own | dict(zip(flags[::2], flags[1::2], strict=True))
        argv = [*itertools.chain(*given.items()), *compilation_cache]
        return run_command("regenerate", [*map(str, argv)])

    return run


def test_the_command_in_shards_and_again(command, llm: LLM, tmp_path: Path) -> None:
    out = tmp_path / "answers"
    flags = ["--out", out, "--temperature", 0.6, "--seed", 3]
    answers: dict[str, dict] = {}
    for shard in ("0/2", "1/2"):
        status, printed, _ = command(*flags, "--shard", shard)
        assert status == 0 and "3 answers of" in printed and "0 left" in printed
    for i in range(2):
        answers |= records(out / f"answers-{i:05d}-of-00002.jsonl")
    regenerate(llm, QUESTIONS, tmp_path / "whole", sampling=SAMPLING)
    assert answers == records(tmp_path / "whole")
    settings = json.loads((out / "settings.json").read_text())
    assert settings["temperature"] == 0.6 and settings["shards"] == 2

    status, printed, _ = command(*flags, "--shard", "1/2", "--batch", 2)
    assert status == 0 and "0 answers of 0 tokens" in printed and "3 done before" in printed
    for changed, name in (
        (["--top-p", "0.9"], "top_p = 1.0, and this run asks for 0.9"),
        (["--shard", "0/3"], "shards = 2, and this run asks for 3"),
        (["--chat-template-kwargs", "{}"], "chat_template_kwargs = null"),
    ):
        status, _, error = command(*flags, "--shard", "0/2", *changed)
        assert status == 2 and f"holds answers under {name}" in error


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--shard", "4/4"], "must be I/N with 0 <= I < N, such as 0/4, got '4/4'"),
        (["--shard", "1"], "must be I/N"),
        (["--shard", "x/2"], "must be I/N"),
        (["--temperature", "-1"], "temperature must be a number from 0 to 100"),
        (["--top-p", "0"], "top_p must be in (0, 1]"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--seconds", "0"], "--seconds must be more than 0"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--max-new-tokens", "96"], "has no room for a prompt and 96 new tokens"),
        (["--max-bad-share", "2"], "--max-bad-share must be in 0..1"),
        (["--chat-template-kwargs", "[1]"], "must be a JSON object, got [1]"),
        (["--chat-template-kwargs", "{"], "not JSON"),
        (["--chat-template-kwargs", '{"tokenize": 1}'], "'tokenize' is not the template's to have"),
        (["--dtype", "float16"], "invalid choice"),
        (["--no-such", "1"], "unrecognized arguments: --no-such"),
        (["--prompts", "no/such.jsonl"], "no/such.jsonl is no file"),
        (["--target", "no/such/folder"], "does not exist; accepted"),
    ],
)
def test_what_cannot_be_is_said_and_leaves_nothing(command, tmp_path: Path, flags, reason) -> None:
    status, _, error = command("--out", tmp_path / "answers", *flags)
    assert status == 2 and reason in error and "Traceback" not in error
    assert not (tmp_path / "answers").exists()


def test_bad_files(command, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": "p0", "text": "the cat"}\n{"id": "a"}\n')
    bad = ["--prompts", tmp_path / "bad.jsonl"]
    status, _, error = command("--out", tmp_path / "answers", *bad)
    assert status == 2 and "bad.jsonl:2: has none of text, conversations and messages" in error
    status, printed, _ = command("--out", tmp_path / "answers", *bad, "--max-bad-share", "0.5")
    assert status == 0 and "skipped" in printed and "0 done before, 0 left" in printed
    status, _, error = command("--out", tmp_path / "bad.jsonl")
    assert status == 2 and "bad.jsonl is no folder" in error
