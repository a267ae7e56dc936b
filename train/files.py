"""Small files that appear whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename: whoever reads, or is left by a killed process,
    finds the old file or the new one. Processes that write the same file do not meet."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def read_json(path: Path) -> Any:
    """What a small file holds; None where there is no such file or what it holds is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
