"""``python -m train bench``: a small step timed on the CPU."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from dflash_jax.testing import tiny_pair
from train.bench import full_rows, random_params
from train.cli.commands import main
from train.mesh import training_sharding
from train.stacked import FrozenTarget

SMALL = [
    "loop.objective.anchors=8",
    "row_length=64",
    "num_layers=1",
    "mask_token_id=100",
    "shape.num_layers=5",
    "shape.hidden_size=64",
    "shape.intermediate_size=128",
    "shape.num_heads=2",
    "shape.num_kv_heads=1",
    "shape.head_dim=32",
    "shape.vocab_size=256",
]


def test_a_small_step_is_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["bench", "qwen3-4b", "--rows", "4", "--steps", "2", "--matmul", "64"]
    command += ["--compilation-cache-dir", str(tmp_path), "--data-parallel-size", "1"]
    assert main([*command, "--set", *SMALL, "loop.accumulation=2"]) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert report["rows"] == 4 and report["step_ms"] > 0 and report["mfu"]["measured"] > 0
    seconds = report["step_ms"] / 1e3
    assert report["tokens_per_second"] == pytest.approx(4 * 64 / seconds)
    assert report["draft_tokens_per_second"] == pytest.approx(4 * 8 * 15 / seconds)
    parts = {part["part"]: part["ms"] for part in report["parts"]}
    assert list(parts) == ["target forward", "draft, loss", "backward, update", "step"]
    assert sum(list(parts.values())[:3]) == pytest.approx(parts["step"])
    assert "ceiling" in printed and "packed tokens/s" in printed


def test_random_weights_and_rows_are_what_a_step_takes() -> None:
    pair = tiny_pair(sharding=training_sharding(1, 1, 1))[0]
    placed = FrozenTarget.of(pair).placed()
    params = random_params(placed, seed=0)
    assert {n: (x.shape, x.dtype) for n, x in params.items()} == {
        n: (x.shape, x.dtype) for n, x in placed.items()
    }
    for name, value in params.items():
        if name.endswith("norm.weight"):
            assert (value == 1).all(), name
        else:
            assert 0.01 < float(jnp.std(value)) < 0.03, name
    rows = full_rows(pair, 2, 16)
    assert rows.tokens.shape == (2, 16) and rows.loss_mask.all() and (rows.segments == 1).all()
    assert int(rows.tokens.max()) < pair.target_config.vocab_size


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--rows", "0"], "--rows must be at least 1, got 0"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
    ],
)
def test_impossible_flags_are_named(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "qwen3-4b", *flags])
    assert reason in capsys.readouterr().err
