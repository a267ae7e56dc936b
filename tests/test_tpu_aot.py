"""The steps as real TPU executables, compiled on a machine without a TPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGES = 40_000  # of tpu_aot.py
SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed; the extra `tpu` brings it",
    ),
]


@pytest.mark.parametrize(
    ("topology", "data", "model"),
    [("v5e:2x2", 2, 2), ("v5p:2x2x1", 1, 4), ("v6e:2x2", 4, 1), ("tpu7x:2x2x1", 2, 2)],
)
def test_everything_compiles_and_moves_no_pool(topology: str, data: int, model: int) -> None:
    """Every shape of every kernel; and the steps, with an attention and a write a layer of the
    target, an attention a layer of the draft and one injection. Donated pools are updated in
    place, none is copied and no collective touches one."""
    command = [sys.executable, str(TESTS / "tpu_aot.py"), topology, str(data), str(model)]
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(TESTS.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads(result.stdout.splitlines()[-1])
    page = 16 * 128 * 2  # bytes of a head's
    pool = PAGES * page * (2 if model == 1 else 1)  # a chip
    calls = {"prefill": 3 + 3 + 1, "plain": 3 + 3 + 1, "speculative": 3 + 3 + 2 + 1}
    for name, step in report["steps"].items():
        assert step["kernels"] == calls[name], name
        assert step["aliased"] >= 5 * 2 * pool, name
        assert step["temporary"] < pool, name
        assert not step["pools_moved"], name
    for name, temporary in report["kernels"].items():
        assert temporary < PAGES * page, name
