"""Documents packed into rows of one length, in memory-mapped files that a run can come back to."""

import dataclasses
import hashlib
import json
import shutil
import tempfile
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from train.rows import PackedRows
from train.samples import DataError, Sample, Tally, has_anchor

META = "meta.json"
ARRAYS = {"tokens": np.int32, "segments": np.int32, "loss_mask": np.bool_}


@dataclasses.dataclass(frozen=True)
class PackingMeta:
    """What was packed. ``split``: documents longer than a row; ``dropped``: documents, or rows'
    lengths of split ones, without two supervised tokens in a row; ``lines``, ``bad_lines``: of the
    files read, where a Tally was given. ``fingerprint`` is a hash of the rows as they lie."""

    row_length: int
    rows: int
    tokens: int
    supervised: int
    documents: int
    split: int
    dropped: int
    lines: int
    bad_lines: int
    fingerprint: str


@dataclasses.dataclass(frozen=True, eq=False)
class PackedDataset:
    """Packed rows [rows, S], in memory or mapped from a folder's files."""

    meta: PackingMeta
    tokens: np.ndarray
    segments: np.ndarray
    loss_mask: np.ndarray

    @classmethod
    def open(cls, folder: Path, *, mapped: bool = True) -> "PackedDataset":
        """What ``write_packed`` left at ``folder``. Raises DataError naming what is missing."""
        try:
            meta = PackingMeta(**json.loads((folder / META).read_bytes()))
            mode = "r" if mapped else None
            arrays = {name: np.load(folder / f"{name}.npy", mmap_mode=mode) for name in ARRAYS}
        except (OSError, EOFError, ValueError, TypeError) as error:
            raise DataError(f"{folder} holds no packed rows: {error}") from error
        for name, values in arrays.items():
            if (values.shape, values.dtype) != ((meta.rows, meta.row_length), ARRAYS[name]):
                raise DataError(
                    f"{folder}: {name} is {values.dtype} {values.shape}; {META} has"
                    f" {meta.rows} rows of {meta.row_length}"
                )
        return cls(meta, **arrays)

    def __len__(self) -> int:
        return self.meta.rows

    def __getitem__(self, rows: np.ndarray | slice) -> PackedRows:
        """These rows, copied out of the files, as numpy arrays."""
        segments = np.array(self.segments[rows])
        index = np.arange(self.meta.row_length, dtype=np.int32)
        begins = np.diff(segments, axis=1, prepend=0) != 0
        starts = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
        positions = np.where(segments > 0, index - starts, 0)
        tokens, loss_mask = np.array(self.tokens[rows]), np.array(self.loss_mask[rows])
        return PackedRows(tokens, segments, positions, loss_mask)  # pyright: ignore[reportArgumentType]


def write_packed(
    folder: Path,
    samples: Iterable[Sample],
    row_length: int,
    *,
    seed: int,
    tally: Tally | None = None,
) -> PackedDataset:
    """Pack whole documents into rows, longest first into the fullest row that has room (best fit),
    and open the result. Rows come shuffled by ``seed``.

    A document longer than a row is split: every row's length of it becomes a document of its own,
    whose positions begin at 0 and which sees nothing of what came before. What has no two
    supervised tokens in a row is dropped. Tokens pass through files; memory holds lengths alone.
    ``folder`` appears whole at the end or not at all; one process writes it.

    Raises DataError where nothing is left to pack, or where ``folder`` exists.
    """
    if folder.exists():
        raise DataError(f"{folder} exists; open it, or remove it to pack anew")
    partial = folder.with_name(f"{folder.name}.partial")
    if partial.exists():  # of a run that was killed
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        _write(partial, samples, row_length, seed, Tally() if tally is None else tally)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return PackedDataset.open(folder)


def pack(samples: Iterable[Sample], row_length: int, *, seed: int) -> PackedDataset:
    """``write_packed``, into memory."""
    with tempfile.TemporaryDirectory() as folder:
        write_packed(path := Path(folder) / "packed", samples, row_length, seed=seed)
        return PackedDataset.open(path, mapped=False)


@dataclasses.dataclass
class _Documents:
    """Documents one behind the other in two files, and their lengths."""

    tokens: BinaryIO
    loss_mask: BinaryIO
    lengths: "array[int]" = dataclasses.field(default_factory=lambda: array("q"))
    supervised: int = 0
    split: int = 0
    dropped: int = 0

    def add(self, sample: Sample, row_length: int) -> None:
        self.split += len(sample.input_ids) > row_length
        for start in range(0, len(sample.input_ids), row_length):
            mask = sample.loss_mask[start : start + row_length]
            if not has_anchor(mask):
                self.dropped += 1
                continue
            self.tokens.write(sample.input_ids[start : start + row_length].tobytes())
            self.loss_mask.write(mask.tobytes())
            self.lengths.append(len(mask))
            self.supervised += int(mask.sum())


def _write(
    folder: Path, samples: Iterable[Sample], row_length: int, seed: int, tally: Tally
) -> None:
    flat = folder / "tokens.flat", folder / "loss_mask.flat"
    with flat[0].open("wb") as tokens_file, flat[1].open("wb") as mask_file:
        documents = _Documents(tokens_file, mask_file)
        for sample in samples:
            documents.add(sample, row_length)
    if not documents.lengths:
        raise DataError(f"there are no samples to pack ({documents.dropped} dropped)")

    lengths = np.array(documents.lengths)
    starts = np.cumsum(lengths) - lengths
    rows = _best_fit(lengths, row_length)
    order = np.random.default_rng(seed).permutation(len(rows))
    tokens, loss_mask = np.memmap(flat[0], np.int32, "r"), np.memmap(flat[1], np.bool_, "r")
    out = {
        name: np.lib.format.open_memmap(
            folder / f"{name}.npy", "w+", dtype, shape=(len(rows), row_length)
        )
        for name, dtype in ARRAYS.items()
    }
    fingerprint = hashlib.blake2b(repr((row_length, len(rows))).encode(), digest_size=16)
    for place, row in enumerate(order):
        at = 0
        for segment, document in enumerate(rows[row], start=1):
            size, start = lengths[document], starts[document]
            out["tokens"][place, at : at + size] = tokens[start : start + size]
            out["loss_mask"][place, at : at + size] = loss_mask[start : start + size]
            out["segments"][place, at : at + size] = segment
            at += size
        for values in out.values():
            fingerprint.update(values[place].tobytes())
    for values in out.values():
        values.flush()
    for path in flat:
        path.unlink()
    meta = PackingMeta(
        row_length=row_length,
        rows=len(rows),
        tokens=int(lengths.sum()),
        supervised=documents.supervised,
        documents=len(lengths),
        split=documents.split,
        dropped=documents.dropped,
        lines=tally.lines,
        bad_lines=tally.bad,
        fingerprint=fingerprint.hexdigest(),
    )
    (folder / META).write_text(json.dumps(dataclasses.asdict(meta), indent=1) + "\n")


def _best_fit(lengths: np.ndarray, row_length: int) -> list[list[int]]:
    """The documents of every row, by their numbers."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(row_length + 1)]  # free tokens -> rows
    rooms = np.zeros(row_length + 1, bool)  # which of these lists are not empty
    for document in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[document])
        room = size + int(rooms[size:].argmax())  # the first that suffices, if any does
        if rooms[room]:
            row = with_room[room].pop()
            rooms[room] = bool(with_room[room])
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(document)
        with_room[room - size].append(row)
        rooms[room - size] = True
    return rows
