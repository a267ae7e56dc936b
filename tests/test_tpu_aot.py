"""The steps as real TPU executables, compiled on a machine without a TPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
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
    ("topology", "data", "model"), [("v5e:2x2", 2, 2), ("v5p:2x2x1", 1, 4), ("v6e:2x2", 4, 1)]
)
def test_every_step_compiles_and_moves_no_pool(topology: str, data: int, model: int) -> None:
    """Donated pools are updated in place on every chip, and no collective touches one."""
    command = [sys.executable, str(TESTS / "tpu_aot.py"), topology, str(data), str(model)]
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(TESTS.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads(result.stdout.splitlines()[-1])
    pools = 5 * 2 * 34 * 16 * (2 if model == 1 else 1) * 64 * 2  # bytes a chip
    for name, step in report.items():
        assert step["aliased"] >= pools, name
        assert not step["pools_moved"], name
