"""``python -m train report --work DIR``: DIR/report.html and DIR/report.json."""

import dataclasses
from pathlib import Path

from dflash_jax.flags import flag
from train.report import write_report


@dataclasses.dataclass(frozen=True)
class ReportArgs:
    work: Path = flag(
        "folder with train.jsonl and evaluation.json, as far as there are", "--work", type=Path,
        required=True,
    )  # fmt: skip


def run(args: ReportArgs) -> int:
    print(f"wrote {write_report(args.work)}")
    return 0
