"""Small files that appear whole or not at all, and folders that one process writes."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
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


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold ``folder`` against other processes that ask in the same way, where its file system has
    locks. Raises BlockingIOError where another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{folder} is being written by another process") from None
        except OSError:  # some network file systems lock nothing
            pass
        yield
    finally:
        os.close(descriptor)
