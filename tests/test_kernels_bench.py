"""``python -m pallas_kernels.bench`` on small shapes of a CPU."""

import json

import pytest

from pallas_kernels import bench
from pallas_kernels.block_attention.shapes import Shape as Attention
from pallas_kernels.kv_injection.shapes import Shape as Injection
from pallas_kernels.range_attention.shapes import Shape as Ranges

ATTENTION = Attention(2, 4, 4, 2, 8, 32, dtype="float32")
RANGES = Ranges(2, 8, 4, 2, 8, dtype="float32")
INJECTION = Injection(2, 4, 2, 16, 2, 8, pages=4, dtype="float32")


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(bench.attention_shapes, "SHAPES", {"one": ATTENTION})
    monkeypatch.setattr(bench.injection_shapes, "SHAPES", {"two": INJECTION})
    monkeypatch.setattr(bench.range_shapes, "SHAPES", {"three": RANGES})
    monkeypatch.setattr(bench, "CALLS", 2)


def test_every_case_is_timed_against_its_floor(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert report["copy_tb_per_s"] > 0 and report["product_tflop_per_s"] > 0
    cases = report["cases"]
    assert set(cases["block_attention/one"]["us"]) == {"reference", "portable"}
    assert set(cases["kv_injection/two"]["us"]) == {"reference"}
    assert set(cases["range_attention/three"]["us"]) == {"reference"}
    for case in cases.values():
        assert case["floor_us"] > 0 and all(taken > 0 for taken in case["us"].values())
    assert printed.startswith("cpu, jax ") and "x floor" in printed


def test_only_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--only", "injection", "--list"]) == 0
    assert capsys.readouterr().out == "kv_injection/two\n"
    for argv, message in [
        (["--only", "nothing"], "--only 'nothing' matches no case; --list names them"),
        (["--only", "("], "--only '(' is no regular expression"),
        (["--fast"], "unrecognized arguments: --fast"),
    ]:
        with pytest.raises(SystemExit):
            bench.main(argv)
        assert message in capsys.readouterr().err


def test_floors() -> None:
    """By hand: 2 rows x 32 tokens of context x 2 heads x 8 dims x K and V x 4 bytes, and q, k, v
    and the result of 4 tokens; then the weights, the features and the rows."""
    assert ATTENTION.bytes == 2 * (2 * 32 * 2 * 8 * 4 + 4 * (4 + 2 + 2 + 4) * 8 * 4)
    assert ATTENTION.flops == 2 * 4 * 4 * 4 * (32 + 2) * 8
    assert INJECTION.bytes == 4 * (16 * 64 + 8 * 16 + 8 * 64)
    assert INJECTION.flops == 2 * 8 * 16 * 64
