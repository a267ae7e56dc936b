"""``python -m train plan``: a step compiled for TPUs on a machine without one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.cli.commands import main

ROOT = Path(__file__).parent.parent
SMALL = [
    "loop.objective.anchors=16",
    "loop.batch_rows=4",
    "row_length=256",
    "num_layers=1",
    "mask_token_id=2000",
    "shape.num_layers=5",
    "shape.hidden_size=256",
    "shape.intermediate_size=512",
    "shape.num_heads=4",
    "shape.num_kv_heads=2",
    "shape.head_dim=64",
    "shape.vocab_size=2048",
]

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; the extra `tpu` brings it",
)


def plan(*changes: str) -> tuple[int, str, dict]:
    """(exit status, what is printed, the report), in a process that has no devices yet."""
    command = [sys.executable, "-m", "train", "plan", "qwen3-8b", "--topology", "v5e:2x2"]
    command += ["--fsdp-size", "4", "--set", *SMALL, *changes]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ
    )
    assert result.stdout, result.stderr[-4000:]
    return result.returncode, result.stdout, json.loads(result.stdout.splitlines()[-1])


@pytest.mark.tpu_aot
@needs_libtpu
def test_a_small_step_fits_and_gathers_its_weights() -> None:
    status, printed, report = plan()
    assert status == 0 and report["fits"]
    memory = report["memory_bytes"]
    assert 0 < memory["arguments"] < memory["peak"] < report["hbm_bytes"] == 16 * 10**9
    assert "it fits" in printed and "peak" in printed
    # Weights come to the activations and never the other way round (stacked._gather).
    assert report["collectives"]["all-gather"] > 0
    assert "all-to-all" not in report["collectives"]


@pytest.mark.tpu_aot
@needs_libtpu
def test_a_batch_too_large_does_not_fit() -> None:
    status, printed, report = plan("loop.batch_rows=65536")
    assert status == 1 and not report["fits"]
    assert report["needed_bytes"] > report["hbm_bytes"]
    assert "does not fit" in printed


def test_a_recipe_without_a_shape_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smollm2", "--topology", "v5e:2x2"]) == 2
    assert "the recipe smollm2 does not state its target's shape" in capsys.readouterr().err


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed here"
)
def test_without_the_compiler_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen3-8b", "--topology", "v5e:2x2"]) == 2
    assert "libtpu: pip install 'dflash_jax[tpu]'" in capsys.readouterr().err
