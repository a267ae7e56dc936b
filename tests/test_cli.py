"""``python -m dflash_jax``: the goldens through a real process, and errors as users meet them."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tiny_model import write_model

from dflash_jax.__main__ import COMMANDS, main
from dflash_jax.cli.bench import step_bytes

ROOT = Path(__file__).parent.parent
GOLDENS = ROOT / "tests" / "goldens"
NAMES = ["llama-scaled", "qwen3-tied-b16", "qwen3-untied"]


def pair_flags(folder: Path) -> list[str]:
    return ["--model", str(folder / "target"), "--draft", str(folder / "draft")]


def golden(name: str, case: int) -> tuple[list[str], list[int], list[int]]:
    """(flags, expected output ids, expected tokens per cycle)."""
    numbers = load_file(GOLDENS / name / "golden.safetensors")
    expected = json.loads((GOLDENS / name / "golden.json").read_text())["cases"][case]
    prompt, output = numbers[f"{case}.prompt"].tolist(), numbers[f"{case}.output"].tolist()
    flags = [
        *pair_flags(GOLDENS / name),
        "--prompt-ids", ",".join(map(str, prompt)),
        "--max-new-tokens", str(expected["max_new_tokens"]),
        "--ignore-eos", "--json",
    ]  # fmt: skip
    return flags, output[len(prompt) :], expected["tokens_committed_per_step"]


@pytest.fixture
def cache(compilation_cache: list[str]) -> list[str]:
    return compilation_cache


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, draft = write_model(tmp_path_factory.mktemp("cli"))
    return ["--model", str(target), "--draft", str(draft)]


def run_main(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_golden_through_a_process(tmp_path: Path) -> None:
    flags, ids, cycles = golden("qwen3-tied-b16", 0)
    result = subprocess.run(
        [sys.executable, "-m", "dflash_jax", "generate", *flags,
         "--compilation-cache-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert (report["output_ids"], report["tokens_per_cycle"]) == (ids, cycles)
    assert (report["text"], report["finish_reason"]) == (None, "length")
    assert list(tmp_path.iterdir()), "compiled programs are kept"
    assert "Traceback" not in result.stderr and "PyTorch" not in result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_goldens(name: str, cache: list[str], capsys) -> None:
    flags, ids, cycles = golden(name, 1)
    status, out, _ = run_main(capsys, "generate", *flags, *cache)
    report = json.loads(out)
    assert status == 0
    assert (report["output_ids"], report["tokens_per_cycle"]) == (ids, cycles)
    emitting = next(i + 1 for i in range(len(cycles)) if sum(cycles[: i + 1]) >= len(ids) - 1)
    assert report["tau"] == pytest.approx((len(ids) - 1) / emitting)
    assert sum(int(k) * n for k, n in report["histogram"].items()) == sum(cycles)
    assert report["seconds"] > 0 and report["tokens_per_second"] > 0


def test_plain_decoding_gives_the_same_tokens_one_a_cycle(cache: list[str], capsys) -> None:
    flags, ids, _ = golden("llama-scaled", 1)
    flags = [*flags[:2], *flags[4:], "--plain"]
    _, out, _ = run_main(capsys, "generate", *flags, *cache)
    report = json.loads(out)
    assert report["output_ids"] == ids
    assert set(report["tokens_per_cycle"]) == {1}


def test_text_streams_to_stdout_and_statistics_to_stderr(tiny, cache, capsys) -> None:
    common = [*tiny, *cache, "--chat", "hat", "--max-new-tokens", "12"]
    _, out, err = run_main(capsys, "generate", *common)
    _, whole, _ = run_main(capsys, "generate", *common, "--json")
    assert out == json.loads(whole)["text"] + "\n"
    assert "tau" in err and "tokens/s" in err


def test_an_output_that_ends_in_its_first_cycle_has_no_rate(cache, capsys) -> None:
    flags, ids, _ = golden("qwen3-tied-b16", 0)  # 16 tokens a cycle
    flags[flags.index("--max-new-tokens") + 1] = "3"
    _, out, _ = run_main(capsys, "generate", *flags, *cache)
    report = json.loads(out)
    assert (report["output_ids"], report["tokens_per_second"]) == (ids[:3], None)


def test_stop_strings_end_the_text(tiny, cache, capsys) -> None:
    common = [*tiny, *cache, "--prompt", "the cat", "--max-new-tokens", "24", "--json"]
    text = json.loads(run_main(capsys, "generate", *common)[1])["text"]
    stop = text[5]
    stopped = json.loads(run_main(capsys, "generate", *common, "--stop", "§", "--stop", stop)[1])
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "COMMAND"),
        (["genrate"], "invalid choice"),
        (["generate", "--prompt", "x", "--no-such"], "unrecognized arguments: --no-such"),
        (["generate", "--prompt", "x", "--max-new", "3"], "unrecognized arguments: --max-new"),
        (["generate"], "give one of --prompt, --prompt-ids and --chat"),
        (["generate", "--prompt", "x", "--chat", "y"], "give one of"),
        (["generate", "--prompt-ids", "1,b"], "such as 1,2,3, got '1,b'"),
        (["generate", "--prompt", "x", "--dtype", "float16"], "invalid choice"),
        (["generate", "--prompt", "x", "--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["generate", "--prompt", "x", "--max-new-tokens", "0"], "must be at least 1"),
        (["generate", "--prompt", "x", "--plain", "--draft", "d"], "--plain contradicts"),
        (["generate", "--prompt", "x", "--model", "m", "--block-size", "4"], "needs a draft"),
        (["bench", "--batch", "0"], "--batch must be at least 1"),
        (["bench", "--block-sizes", "1,4"], "at least 2"),
        (["bench", "--block-sizes", "4", "--model", "m"], "needs a draft"),
    ],
)
def test_wrong_flags_exit_with_their_reason(argv: list[str], reason: str, capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--model", "no/such/folder"], "does not exist"),
        (["--block-size", "99"], "block_size must be in 1..16"),
        (["--max-model-len", "1"], "max_model_len must be in"),
        (["--prompt-ids", "1,5000"], "prompt token id 5000 is not in the vocabulary"),
        (["--prompt", "text"], "has no tokenizer; give the prompt as token ids"),
        (["--prompt-ids", "1", "--stop", "x"], "stop strings need one"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_2(change, reason, cache, capsys) -> None:
    flags = pair_flags(GOLDENS / "qwen3-tied-b16") if change[0] != "--model" else []
    prompt = [] if change[0].startswith("--prompt") else ["--prompt-ids", "1"]
    status, out, err = run_main(capsys, "generate", *flags, *prompt, *change, *cache)
    assert (status, out) == (2, "")
    assert err.startswith("python -m dflash_jax generate: ") and reason in err
    assert len(err.splitlines()) == 1


def test_a_config_we_do_not_run(tmp_path: Path, cache, capsys) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "architectures": ["Mamba"]}')
    status, _, err = run_main(capsys, "info", "--model", str(tmp_path))
    assert status == 2 and "accepted: LlamaForCausalLM, Qwen3ForCausalLM" in err


def test_info_describes_both_models(tiny, capsys) -> None:
    status, out, _ = run_main(capsys, "info", *tiny, "--json", "--dtype", "bfloat16")
    report = json.loads(out)
    assert status == 0
    assert report["taps"] == report["draft"]["config"]["target_layer_ids"]
    for part in ("target", "draft"):
        memory = report[part]["memory"]
        assert memory["weights_bytes"] == 2 * report[part]["parameters"]
    assert report["devices"] and report["versions"]["jax"]
    assert "taps: " in run_main(capsys, "info", *tiny)[1]


def test_bench_prints_ceiling_and_shapes_first_and_json_last(tiny, cache, capsys) -> None:
    argv = [*tiny, *cache, "--max-new-tokens", "8", "--batch", "2", "--block-sizes", "4,16"]
    status, out, _ = run_main(capsys, "bench", *argv, "--prompt", "the", "--chat", "hat")
    lines = out.splitlines()
    report = json.loads(lines[-1])
    assert status == 0
    assert [line.split()[0] for line in lines[:8]] == [
        "device", "versions", "pair", "shapes", "ceiling", "floor", "floor", "floor",
    ]  # fmt: skip
    assert [row["decoding"] for row in report["speculative"]] == ["b = 4", "b = 16"]
    for row in (report["plain"], *report["speculative"]):
        assert row["outputs_equal_to_plain"] == report["prompts"] == 2
        assert row["step_ms"] > 0 and row["tokens_per_second"] > 0
    assert report["plain"]["tau"] == 1.0


def test_a_steps_bytes_are_its_weights_and_the_head_for_each_model(load_golden) -> None:
    for name in NAMES:
        pair, params = load_golden(name)
        config = pair.target_config
        head = 4 * config.vocab_size * config.hidden_size
        target = sum(x.nbytes for n, x in params.target.items() if "embed_tokens" not in n)
        target += head if config.tie_word_embeddings else 0
        draft = sum(x.nbytes for x in params.draft.values())
        assert step_bytes(pair, speculation=True) == target + draft + head
        assert step_bytes(pair, speculation=False) == target


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_help(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for field in dataclasses.fields(COMMANDS[command][1]):
        assert field.metadata["names"][0] in text and field.metadata["help"]
