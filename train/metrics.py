"""What a run tells of itself: a line of JSON a record, the same in TensorBoard, a bar on screen."""

import importlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import jax

from train.files import write_whole


class MetricsLog:
    """Records in ``folder``/train.jsonl and as scalars in ``folder``/tensorboard.

    A run that resumes from the checkpoint of ``resume_step`` (0: starts) first drops the lines of
    later steps and a last line that a killed run tore, and writes TensorBoard's files anew from
    the lines that remain: neither curve has a step twice. Only process 0 touches files.

    Raises ImportError without the ``train`` extra; ValueError, naming file and line, on a line
    that is no record.
    """

    def __init__(self, folder: Path, *, resume_step: int):
        self._file: TextIO | None = None
        if jax.process_index() != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path, board = folder / "train.jsonl", folder / "tensorboard"
        records = [record for record in read_records(path) if record["step"] <= resume_step]
        self._events = _TensorBoard(board)
        write_whole(path, "".join(map(_line, records)))
        for record in records:
            self._events.add(record)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a record of numbers, lists of numbers and mappings of them; on disk on return.

        ``step`` and ``time`` (seconds since 1970) are added to it. In TensorBoard the items of a
        list are accuracy/1, accuracy/2 and so on, those of a mapping evaluation/tau. What is not
        finite is null in JSON and absent from TensorBoard.
        """
        if self._file is None:
            return
        record = {"step": step, "time": time.time()} | {k: _finite(v) for k, v in values.items()}
        self._file.write(_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())  # a checkpoint that survives a crash finds its lines
        self._events.add(record)
        self._events.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._events.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a train.jsonl, none where there is no file; a torn last line is left out.

    Raises ValueError, naming file and line, on any other line that is no record.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    # Every whole line ends in a line feed, so that the last part is empty, or torn.
    return [_record(line, f"{path}:{number}") for number, line in enumerate(lines[:-1], 1)]


class Progress:
    """A bar up to ``steps`` with loss, tau, tokens/s and the time left; without a terminal, a plain
    line a record. Process 0 alone shows it.

    ``start`` steps are already done. Raises ImportError without the ``train`` extra.
    """

    def __init__(self, steps: int, *, start: int = 0, stream: TextIO | None = None):
        self._steps, self._start = steps, start
        self._stream = sys.stderr if stream is None else stream
        self._shown = jax.process_index() == 0
        self._started = time.perf_counter()
        self._bar: Any = None
        if self._shown and self._stream.isatty():
            self._bar = _need("tqdm").tqdm(
                total=steps, initial=start, unit="step", file=self._stream, dynamic_ncols=True
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def move(self, step: int) -> None:
        """``step`` steps are done."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        """Show a record as MetricsLog gets it: its loss, accept_length and tokens_per_second."""
        told = [
            f"{label} {values[key]:{form}}"
            for key, label, form in (
                ("loss", "loss", ".3f"),
                ("accept_length", "tau", ".2f"),
                ("tokens_per_second", "tokens/s", ",.0f"),
            )
            if key in values
        ]
        if self._bar is not None:
            self.move(step)
            self._bar.set_postfix_str("  ".join(told))
        else:
            self.say("  ".join([f"step {step}/{self._steps}", *told, f"{self._left(step)} left"]))

    def say(self, text: str) -> None:
        """A line of text, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif self._shown:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _left(self, step: int) -> str:
        done = step - self._start
        if done < 1:
            return "unknown"
        seconds = round((time.perf_counter() - self._started) / done * (self._steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class _TensorBoard:
    """Scalars of records in a folder of their own, emptied first."""

    def __init__(self, folder: Path):
        writer = _need("tensorboard.summary.writer.event_file_writer")
        self._event = _need("tensorboard.compat.proto.event_pb2").Event
        self._summary = _need("tensorboard.compat.proto.summary_pb2").Summary
        if folder.exists():
            shutil.rmtree(folder)
        self._writer = writer.EventFileWriter(str(folder))
        self.flush, self.close = self._writer.flush, self._writer.close

    def add(self, record: Mapping[str, Any]) -> None:
        rest = {name: value for name, value in record.items() if name not in ("step", "time")}
        values = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(rest, "")
        ]
        self._writer.add_event(
            self._event(
                wall_time=record["time"], step=record["step"], summary=self._summary(value=values)
            )
        )


def _need(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"training logs need {error.name}: pip install 'dflash_jax[train]'"
        ) from error


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}") from error
    if not isinstance(record, dict) or not all(
        isinstance(record.get(name), int | float) for name in ("step", "time")
    ):
        raise ValueError(f"{where}: a record has a step and a time")
    return record


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def _scalars(value: Any, tag: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = ((str(i), item) for i, item in enumerate(value, 1))
    else:
        if value is not None:
            yield tag, float(value)
        return
    for name, item in items:
        yield from _scalars(item, f"{tag}/{name}" if tag else name)
