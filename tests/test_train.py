"""``python -m train`` as its user meets it: a whole small run, and what it says of mistakes."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_model import write_model

import dflash_jax
from dflash_jax import EngineConfig, SamplingParams
from dflash_jax.testing import Tally, assert_same_tokens
from train import __main__ as program
from train.loop import LoopConfig
from train.objective import ObjectiveConfig
from train.recipes import RECIPES

ENGINE = EngineConfig(max_num_seqs=4, max_model_len=96, prefill_tokens=64, batch_buckets=(4,))
TINY = dataclasses.replace(
    RECIPES["smollm2"],
    name="tiny",
    initial="random",
    num_layers=1,
    intermediate_size=32,
    num_taps=2,
    block_size=4,
    mask_token_id=287,
    max_position_embeddings=512,
    self_written=2,
    answers=(
        SamplingParams(max_new_tokens=24),
        SamplingParams(temperature=0.6, seed=1, max_new_tokens=24),
    ),
    engine=dataclasses.replace(ENGINE, seed=1),
    evaluation=ENGINE,
    row_length=64,
    loop=LoopConfig(
        ObjectiveConfig(anchors=16, gamma=4.0, anchor_group=8),
        batch_rows=2,
        learning_rate=1e-2,
        steps=20,
        log_every=10,
    ),
)
TEXTS = ["the cat", "and the hat", "hat cat", "x", "a hat", "the the", "\u2028 cat", "that"]


def write_prompts(path: Path, texts: Sequence[str]) -> Path:
    lines = (
        json.dumps({"id": f"p{i}", "source": "s", "text": text}, ensure_ascii=False)
        for i, text in enumerate(texts)
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(RECIPES, "tiny", TINY)
    # Each setting compiles an engine.
    monkeypatch.setattr(program, "EVALUATED", (program.EVALUATED[0], program.EVALUATED[-1]))
    return "tiny"


def test_a_whole_run_makes_a_draft_that_serves(tiny: str, tmp_path: Path) -> None:
    target, _ = write_model(tmp_path)
    work = tmp_path / "made" / "work"
    prompts = write_prompts(tmp_path / "prompts.jsonl", TEXTS)
    held_out = write_prompts(tmp_path / "evaluation.jsonl", ["a cat", "the hat and"])
    arguments = [tiny, "--work", work, "--target", target, "--prompts", prompts]
    arguments += ["--evaluation", held_out, "--dtype", "float32", "--max-new-tokens", 20]
    program.main([str(argument) for argument in arguments])

    answers = [json.loads(line) for line in (work / "answers.jsonl").read_text().splitlines()]
    assert len({answer["id"] for answer in answers}) == len(answers) >= 4
    log = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [10, 20] and log[1]["loss"] < log[0]["loss"]
    results = json.loads((work / "evaluation.json").read_text())["results"]
    settings = [(r["block_size"], r["draft_sampling"], r["temperature"]) for r in results]
    assert settings == [(4, "argmax", 0.0), (4, "argmax", 1.0), (2, "argmax", 0.0)]
    assert all(r["questions"] == 2 and r["raw_tau"] >= 0.9 for r in results)

    drafted = dflash_jax.load(target, work / "draft", engine=ENGINE)
    plain = dflash_jax.load(target, engine=ENGINE)
    assert drafted.pair.draft_config == TINY.draft_config(drafted.pair.target_config)
    tally = Tally()
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(temperature, seed=7, max_new_tokens=30, ignore_eos=True)
        for text in TEXTS[:3]:
            ids = drafted.encode(text)
            got, expected = (llm.generate(ids, sampling) for llm in (drafted, plain))
            outputs = (expected.output_ids, got.output_ids)
            params = drafted.engine.params
            assert_same_tokens(drafted.pair, params, ids, sampling, *outputs, tally)
    tally.check()


def test_mistakes_are_named_in_one_line(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, no traceback, and before anything slow begins."""
    good = write_prompts(tmp_path / "good.jsonl", TEXTS)
    folder, work = tmp_path / "folder", tmp_path / "work"
    folder.mkdir()

    def bad(line: str) -> Path:
        path = tmp_path / "bad.jsonl"
        path.write_text(good.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
        return path

    def says(*arguments: object) -> str:
        with pytest.raises(SystemExit) as exit:
            program.main([tiny, "--work", str(work), *map(str, arguments)])
        assert exit.value.code == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("python -m train: error: ") and "\n" not in error
        assert not work.exists()
        return error

    assert "the stage regenerate needs --prompts" in says()
    assert "the stage evaluate needs --evaluation" in says("--prompts", good)
    stage = ("--stage", "regenerate")
    absent = tmp_path / "absent"
    assert f"needs {absent}, which is no file" in says("--prompts", absent, *stage)
    assert f"needs {folder}, which is no file" in says("--prompts", folder, *stage)
    no_held_out = says("--prompts", good, "--evaluation", absent, *stage)
    assert f"{absent} is no file" in no_held_out
    assert f"{work}/answers.jsonl, which is no file" in says("--stage", "train")
    needs_draft = says("--stage", "evaluate", "--evaluation", good)
    assert f"needs {work}/draft, which the stage train writes" in needs_draft
    for line in ("{", "[]", '{"id": "a", "source": "b"}', '{"id": 1, "source": "b", "text": "c"}'):
        assert f"bad.jsonl:{len(TEXTS) + 1}: " in says("--prompts", bad(line), *stage)
    empty = tmp_path / "empty"
    empty.write_text("")
    assert f"{empty} is empty" in says("--prompts", empty, *stage)


def test_a_target_that_is_not_there(tiny: str, tmp_path: Path, capsys) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", TEXTS)
    arguments = [tiny, "--work", tmp_path / "work", "--target", tmp_path / "none", "--prompts"]
    with pytest.raises(SystemExit) as exit:
        program.main([*map(str, arguments), str(prompts), "--stage", "regenerate"])
    assert exit.value.code == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("python -m train: error: ") and "does not exist; accepted" in error


def test_commands_beside_the_recipes(tmp_path: Path, capsys) -> None:
    for name in ("regenerate", "evaluate", "report"):
        with pytest.raises(SystemExit) as exit:
            program.main([name])
        assert exit.value.code == 2
        assert f"python -m train {name}: error: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        program.main(["report", "--work", str(tmp_path)])
    assert exit.value.code == 0 and (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["nosuch", "--work", "w"], r"invalid choice: 'nosuch' \(choose from"),
        (["smollm2"], "required: --work"),
        (["smollm2", "--work", "w", "--seconds", "0"], "--seconds: must be more than 0, got 0"),
        (["smollm2", "--work", "w", "--max-new-tokens", "0"], "must be at least 1, got 0"),
        (["smollm2", "--work", "w", "--stage", "export"], "invalid choice: 'export'"),
    ],
)
def test_wrong_flags(arguments: list[str], match: str, capsys) -> None:
    with pytest.raises(SystemExit) as exit:
        program.main(arguments)
    assert exit.value.code == 2
    assert re.search(match, capsys.readouterr().err.splitlines()[-1])
