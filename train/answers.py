"""Answer files: append-only JSONL that a run may leave at any moment and take up again."""

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.files import read_json, write_whole
from train.samples import DataError

SETTINGS = "settings.json"
_ID = b'{"id": '


class AnswerFile:
    """One JSONL file of answers and, beside it, FILE.skipped for questions that get none, each with
    its reason. ``done``: the ids in both when it was opened, and since.

    One process at a time: a second one gets a DataError. A last line that a killed process left
    unfinished is cut off. Every line reaches the operating system before ``write`` returns.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.done: set[str] = set()
        self._answers, self._skipped = path.open("ab+"), skipped_path(path).open("ab+")
        try:
            fcntl.flock(self._answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise DataError(f"{path} is being written by another process") from None
        try:
            for file in (self._answers, self._skipped):
                self.done |= _take_up(file, Path(file.name))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._answers.close()
        self._skipped.close()

    def write(self, id: str, record: Mapping[str, Any]) -> None:
        self._append(self._answers, id, record)

    def skip(self, id: str, source: str, reason: str) -> None:
        self._append(self._skipped, id, {"source": source, "reason": reason})

    def _append(self, file, id: str, record: Mapping[str, Any]) -> None:
        if id in self.done:
            raise ValueError(f"id {id!r} is written already")
        file.write(json.dumps({"id": id, **record}).encode() + b"\n")
        file.flush()
        self.done.add(id)


def answers_path(folder: Path, shard: int, shards: int) -> Path:
    """The answer file of one shard, counted from 0."""
    return folder / f"answers-{shard:05d}-of-{shards:05d}.jsonl"


def skipped_path(answers: Path) -> Path:
    """Where an answer file keeps the questions without an answer."""
    return answers.with_name(answers.name + ".skipped")


def check_settings(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether ``folder`` is claimed already (``claim``).

    Raises DataError naming the first setting that differs from those of the answers there.
    """
    path = folder / SETTINGS
    if not path.exists():
        return False
    held, wanted = read_json(path), _as_json(settings)
    if not isinstance(held, dict):
        raise DataError(f"{path}, which tells whose the answers beside it are, cannot be read")
    for name in {**held, **wanted}:
        if held.get(name) != wanted.get(name):
            raise DataError(
                f"{folder} holds answers under {name} = {json.dumps(held.get(name))}, and this run "
                f"asks for {json.dumps(wanted.get(name))}; give the same settings, or another "
                "folder"
            )
    return True


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make ``folder`` hold answers under ``settings`` (JSON values) alone. Raises DataError."""
    if check_settings(folder, settings):
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _take_up(file, path: Path) -> set[str]:
    """Cut ``file`` at its last whole line and return the ids of its lines."""
    file.seek(0)
    ids, end = set(), 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            if not line.startswith(_ID):
                raise ValueError("it must begin with an id")
            # The id alone: to parse millions of token ids for each would take minutes.
            ids.add(json.JSONDecoder().raw_decode(line[len(_ID) :].decode())[0])
        except ValueError as error:
            raise DataError(f"{path}:{number}: not a line of answers: {error}") from error
    if end < file.tell():  # not otherwise: even cutting nothing makes the file look rewritten
        file.truncate(end)
    return ids
