"""``python -m train`` as its user meets it: a whole small run, and what it says of mistakes."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tiny_model import make_tokenizer, write_model
from training_process import SMALL, losses, write_data

import dflash_jax
from dflash_jax import EngineConfig, SamplingParams
from dflash_jax.testing import Tally, assert_same_tokens
from train.cli.overrides import with_overrides
from train.evaluate import Setting
from train.files import sole_writer
from train.recipes import RECIPES
from train.recipes.smollm2 import SMOLLM2
from train.recipes.tiny import TINY

ENGINE = EngineConfig(max_num_seqs=4, max_model_len=96, prefill_tokens=64, batch_buckets=(4,))
DECODING = [
    f"{engine}.{field}"
    for engine in ("engine", "evaluation")
    for field in ("max_num_seqs=4", "max_model_len=96", "prefill_tokens=64", "batch_buckets=[4]")
]
SETTINGS = [
    *SMALL, *DECODING, "self_written=2", "evaluation_tokens=20", "evaluated_blocks=[4, 2]",
    "evaluated_temperatures=[0]", "loop.steps=8", "loop.checkpoint_every=4",
    'answers=[{"max_new_tokens": 24}, {"temperature": 0.6, "seed": 1, "max_new_tokens": 24}]',
]  # fmt: skip
TEXTS = ["the cat", "and the hat", "hat cat", "x", "a hat", "the the", "\u2028 cat", "that"]
RunCommand = Callable[[str, Sequence[str]], tuple[object, str, str]]
Train = Callable[..., tuple[object, str, str]]


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    texts = (json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def write_prompts(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    lines = [{"id": f"p{i}", "source": "s", "text": text} for i, text in enumerate(texts)]
    return write_lines(path, lines)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))[0]


@pytest.fixture
def train(target: Path, run_command: RunCommand, compilation_cache: list[str]) -> Train:
    """Runs smollm2 made small: (exit status, stdout, stderr)."""

    def run(
        *arguments: object, work: Path, settings: Sequence[str] = ()
    ) -> tuple[object, str, str]:
        argv = ["--work", work, "--data-parallel-size", 1, *compilation_cache, *arguments]
        argv += () if "--target" in arguments else ("--target", target)
        argv += ["--set", *SETTINGS, *settings]
        return run_command("smollm2", [str(argument) for argument in argv])

    return run


def test_a_whole_run_makes_a_draft_that_serves(train: Train, target: Path, tmp_path: Path) -> None:
    work = tmp_path / "made" / "work"
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    held_out = write_prompts(tmp_path / "evaluation.jsonl", ["a cat", "the hat and"])
    arguments = ["--prompts", prompts, "--evaluation", held_out]
    status, out, err = train(*arguments, work=work)
    assert status == 0, err
    assert "exported step 8 to " in out and f"wrote {work / 'report.html'}" in out

    def read(name: str) -> list[dict]:
        lines = (work / "answers" / name).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    file = "answers-00000-of-00001.jsonl"
    asked = [line["id"] for line in read(file) + read(f"{file}.skipped")]
    asked_itself = [line["id"] for line in read("self_written.jsonl")]
    assert sorted(asked) == sorted([*(f"p{i}" for i in range(len(TEXTS))), *asked_itself])
    curve = losses(work)
    assert [step for step, _ in curve] == list(range(1, 9)) and curve[-1][1] < curve[0][1]
    evaluation = json.loads((work / "evaluation.json").read_text())
    assert evaluation["settings"]["target"] == str(target)
    fields = ("block_size", "temperature", "draft_sampling")
    measured = [Setting(*(r[name] for name in fields)) for r in evaluation["results"]]
    assert measured == [Setting(4, 0.0, "coupled"), Setting(2, 0.0, "coupled")]
    assert all(r["questions"] == 2 and r["raw_tau"] >= 0.9 for r in evaluation["results"])

    drafted = dflash_jax.load(target, work / "draft", dtype="float32", engine=ENGINE)
    plain = dflash_jax.load(target, dtype="float32", engine=ENGINE)
    recipe = with_overrides(SMOLLM2, SETTINGS)
    assert drafted.pair.draft_config == recipe.draft_config(drafted.pair.target_config)
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

    names = ("answers", "packed", "checkpoints")
    before = {name: written_at(work / name) for name in names}
    log = (work / "train.jsonl").read_text()
    again = [*arguments, "--stage", "regenerate", "train"]
    assert train(*again, work=work)[0] == 0
    assert {name: written_at(work / name) for name in names} == before
    assert (work / "train.jsonl").read_text() == log
    status, _, err = train(*again, work=work, settings=['answers=[{"temperature": 1}]'])
    assert status == 2 and "holds answers under answers = [" in err
    with sole_writer(work):
        status, _, err = train(*again, work=work)
    assert status == 2 and f"{work} is being written by another process" in err


def written_at(folder: Path) -> dict[str, int]:
    """Every file, and when it was written last."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_conversations_in_place_of_answers(train: Train, target: Path, tmp_path: Path) -> None:
    """A line that is malformed is named; more of them than allowed end the run."""
    chats = [
        {
            "id": str(i),
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": f"{text} and the hat {i}"},
            ],
        }
        for i, text in enumerate(TEXTS * 3)
    ]
    data = write_lines(tmp_path / "data.jsonl", [*chats, {"messages": []}])
    chatting = Path(shutil.copytree(target, tmp_path / "target"))
    tokenizer = make_tokenizer()
    # Where an answer is asked for, the prompt must begin as the answered conversation does.
    tokenizer.chat_template = str(tokenizer.chat_template).replace("}assistant:", "}<s>assistant:")
    tokenizer.save_pretrained(chatting)
    arguments = ["--data", data, "--target", chatting, "--stage", "train"]
    work = tmp_path / "work"
    status, out, err = train(*arguments, work=work)
    assert status == 2 and f"{data}:{len(chats) + 1}: " in err
    assert not (work / "packed" / "train").exists()
    arguments += ["--max-bad-share", 0.1]
    status, out, err = train(*arguments, work=work, settings=["loop.steps=2"])
    assert status == 0 and f"{len(chats)} documents" in out
    assert (work / "draft" / "model.safetensors").is_file()
    assert not (work / "answers").exists()


def test_features_from_disk_give_the_losses_of_those_computed(train: Train, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl", 12)
    arguments, entropy = ["--data", data, "--stage", "train"], ["loop.objective.loss.kl=0"]
    assert train(*arguments, work=tmp_path / "online", settings=entropy)[0] == 0
    status, out, _ = train(
        *arguments, "--offline-features", work=tmp_path / "offline", settings=entropy
    )
    assert status == 0 and "features of 12 of 12 rows" in out
    online, offline = (np.array(losses(tmp_path / name)) for name in ("online", "offline"))
    assert len(online) == 8
    np.testing.assert_allclose(offline, online, rtol=1e-6)


def test_mistakes_are_named_in_one_line(train: Train, target: Path, tmp_path: Path) -> None:
    """Exit status 2, no traceback, and before anything slow begins."""
    good = write_prompts(tmp_path / "good.jsonl")
    folder, work = tmp_path / "folder", tmp_path / "work"
    folder.mkdir()
    (taken := tmp_path / "taken").touch()

    def says(*arguments: object, lines: int = 1, **options) -> str:
        """``lines``: of the message, the usage that argparse puts before it left out."""
        status, out, err = train(*arguments, **{"work": work} | options)
        assert (status, out) == (2, "") and not work.exists()
        _, _, message = err.partition("python -m train smollm2: error: ")
        assert message.count("\n") == lines, err
        return message

    prompts = ("--prompts", good)
    assert "the stage train needs --data, --prompts" in says()
    assert "the stage evaluate needs --evaluation" in says(*prompts, "--stage", "evaluate")
    assert "the stage regenerate needs --prompts" in says("--stage", "regenerate")
    assert "does not train its target" in says("--stage", "target")
    assert f"answers of an earlier run in {work / 'answers'}" in says("--stage", "train")
    assert f"needs {work / 'draft'}, which the stage train writes" in says(
        "--evaluation", good, "--stage", "evaluate"
    )
    absent = tmp_path / "absent"
    for flag in ("--prompts", "--data", "--evaluation"):
        assert f"{absent} is no file" in says(flag, absent)
        assert f"{folder} is no file" in says(flag, folder)
    assert "--prompts (the target answers them) or --data" in says(*prompts, "--data", good)
    assert f"--work {taken} is no folder" in says(*prompts, work=taken)
    assert f"Not a directory: '{taken / 'work'}'" in says(*prompts, work=taken / "work")
    assert "absent does not exist; accepted" in says("--target", absent, *prompts)
    assert "--seconds must be more than 0, got 0" in says(*prompts, "--seconds", 0)
    assert "--max-bad-share must be in 0..1" in says(*prompts, "--max-bad-share", 2)
    assert "invalid choice: 'export'" in says(*prompts, "--stage", "export")
    assert "go together, with --distributed" in says(*prompts, "--process-id", 0)
    assert "1 x 3 x 2 (data x fsdp x model) mesh needs 6 devices" in says(
        *prompts, "--fsdp-size", 3, "--tensor-parallel-size", 2
    )
    assert "num_taps must be in 1..8, got 9" in says(*prompts, settings=["num_taps=9"])
    assert "mask_token_id 288 is not in the target's vocabulary, 0..287" in says(
        *prompts, settings=["mask_token_id=288"]
    )
    assert "needs the target's intermediate_size 128, got 32" in says(
        *prompts, settings=["initial=target"]
    )
    for name in ("num_layers", "block_size", "intermediate_size", "max_position_embeddings"):
        said = says(*prompts, settings=["evaluated_blocks=[]", f"{name}=0"])
        assert f"{name.replace('num_layers', 'num_hidden_layers')}=0 is not run; accepted" in said
    mute = Path(shutil.copytree(target, tmp_path / "mute"))
    (mute / "tokenizer.json").unlink()
    (mute / "tokenizer_config.json").unlink()
    assert "mute has no tokenizer with a chat template" in says(*prompts, "--target", mute)
    assert "must be HOST:PORT, got 'host'" in says(
        *prompts, "--distributed", *("--coordinator", "host", "--num-processes", 2),
        *("--process-id", 0),
    )  # fmt: skip
    kl = says(*prompts, "--offline-features", settings=["loop.objective.loss.kl=0.5"])
    assert "--offline-features: the recipe's loop.objective.loss.kl is 0.5" in kl
    (empty := tmp_path / "empty.jsonl").touch()
    assert f"no question in {empty}" in says("--prompts", empty)
    for line in ("{", "[]", '{"id": "a", "source": "b"}', '{"id": 1, "source": "b", "text": "c"}'):
        bad = tmp_path / "bad.jsonl"
        bad.write_text(good.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
        assert f"bad.jsonl:{len(TEXTS) + 1}: " in says("--prompts", bad, lines=2)


def test_settings_take_the_type_of_their_fields() -> None:
    recipe = with_overrides(
        SMOLLM2,
        [
            "loop.optimizer.learning_rate=3e-4", "loop.optimizer.kind=muon", "loop.seconds=60",
            "loop.steps=null", "loop.epochs=2", "loop.objective.tiles=[64, 32]",
            "evaluated_temperatures=[0, 0.5]", "intermediate_size=null", "target=org/name",
            "evaluate_untrained=true", 'template_variables={"enable_thinking": false}',
            'answers=[{"temperature": 1, "max_new_tokens": 8}]', "loop.optimizer.warmup=Infinity",
            "loop.optimizer.warmup=0.5",
        ],
    )  # fmt: skip
    optimizer, loop = recipe.loop.optimizer, recipe.loop
    assert (optimizer.learning_rate, optimizer.kind, optimizer.warmup) == (3e-4, "muon", 0.5)
    assert (loop.steps, loop.epochs, loop.seconds) == (None, 2.0, 60.0)
    assert isinstance(loop.epochs, float) and loop.objective.tiles == (64, 32)
    assert recipe.evaluated_temperatures == (0.0, 0.5) and recipe.intermediate_size is None
    assert (recipe.target, recipe.evaluate_untrained) == ("org/name", True)
    assert recipe.template_variables == {"enable_thinking": False}
    assert recipe.answers == (SamplingParams(1.0, max_new_tokens=8),)
    assert with_overrides(TINY, []) == TINY
    assert with_overrides(TINY, ["loop.seconds=Infinity"]).loop.seconds == math.inf


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("steps", "--set wants FIELD=VALUE, got 'steps'"),
        ("steps=3", "Recipe has no field 'steps'; it has answers, block_size, dtype, "),
        ("loop.step=3", "LoopConfig has no field 'step'; it has accumulation, batch_rows, "),
        ("loop=3", "set one of loop.objective, loop.batch_rows"),
        ("dtype.name=3", "dtype has no parts"),
        ("num_layers=two", "num_layers must be int, got two"),
        ("num_layers=2.5", "num_layers must be int, got 2.5"),
        ("num_layers=true", "num_layers must be int, got true"),
        ("num_layers=null", "num_layers must be int, got null"),
        ("intermediate_size=x", "intermediate_size must be int | None, got x"),
        ("loop.optimizer.clip=NaN", "clip must be float, got NaN"),
        ("loop.optimizer.kind=sgd", "kind must be adamw or muon, got sgd"),
        ("initial=zeros", "initial must be random or target, got zeros"),
        ("evaluated_blocks=4", "evaluated_blocks must be tuple[int, ...], got 4"),
        ("evaluated_blocks=[4.5]", "evaluated_blocks must be tuple[int, ...], got [4.5]"),
        ('answers=[{"heat": 1}]', "SamplingParams has no field 'heat'; it has "),
        ("loop.batch_rows=0", "loop.batch_rows must be at least 1, got 0"),
        ("loop.epochs=1", "give one of steps and epochs"),
        ("loop.seed=-1", "loop.seed must be in 0..4294967295, got -1"),
        ("loop.objective.tiles=[0, 8]", "objective.tiles must be at least 1, got (0, 8)"),
        ("self_written=-1", "self_written must be at least 0, got -1"),
        ("evaluated_blocks=[0]", "evaluated_blocks (0,) must be at least 1"),
        ("evaluated_temperatures=[-1]", "temperature must be a number from 0 to 100, got -1.0"),
        ("evaluation_tokens=0", "max_new_tokens must be at least 1"),
        ("evaluated_blocks=[32]", "evaluated_blocks (32,) cannot be more than block_size 16"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(override: str, reason: str) -> None:
    with pytest.raises(ValueError) as refused:
        with_overrides(SMOLLM2, [override])
    assert reason in str(refused.value)
    assert str(refused.value).startswith(f"--set {override}: " if "=" in override else "--set")


def test_a_missing_extra_is_named() -> None:
    program = "import runpy, sys; sys.modules['matplotlib'] = None; "
    program += "runpy.run_module('train', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "matplotlib is not installed" in done.stderr and "[train]" in done.stderr


def test_every_command_has_help(run_command: RunCommand) -> None:
    for name in (*RECIPES, "regenerate", "evaluate", "report"):
        status, out, err = run_command(name, ["--help"])
        assert (status, err) == (0, "") and f"python -m train {name}" in out
        status, out, err = run_command(name, [])
        assert status == 2 and "error: the following arguments are required" in err
    status, out, _ = run_command("--help", [])
    assert status == 0 and all(name in out for name in (*RECIPES, "regenerate"))
    status, _, err = run_command("nosuch", ["--work", "w"])
    assert status == 2 and "invalid choice: 'nosuch'" in err
