"""Small files that appear whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename: whoever reads, or is left by a killed process,
    finds the old file or the new one. Processes that write the same file do not meet."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
