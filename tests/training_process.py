"""``python -m train`` in a process of its own, on a run of seconds: what is killed, and what spans
several processes."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SMALL = (
    "initial=random", "dtype=float32", "num_layers=1", "intermediate_size=32", "num_taps=2",
    "block_size=4", "evaluated_blocks=[4]", "mask_token_id=287", "max_position_embeddings=512",
    "row_length=64", "held_out_share=0.0", "loop.objective.anchors=8", "loop.batch_rows=4",
    "loop.log_every=1", "loop.seed=3",
)  # fmt: skip
"""Of ``smollm2``, for the target of tiny_model.py."""


def write_data(path: Path, documents: int = 40) -> Path:
    """Token ids that repeat with a period of their own."""
    lines = (
        {
            "id": str(number),
            "input_ids": [3 + (number + i % (3 + number % 5)) % 280 for i in range(40)],
            "loss_mask": [0] * 4 + [1] * 36,
        }
        for number in range(documents)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def start(command: Sequence[object], log: Path) -> subprocess.Popen[bytes]:
    """``python -m COMMAND`` with what it prints in ``log``."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *map(str, command)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )


def losses(work: Path) -> list[tuple[int, float]]:
    """(step, loss) of every whole line of train.jsonl."""
    path = work / "train.jsonl"
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0].splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in whole]
    return [(record["step"], record["loss"]) for record in records]
