"""Training samples: token ids with a loss mask, read from JSONL and packed into fixed rows."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from train.rows import PackedRows


class DataError(ValueError):
    """Training data that cannot be used; the message names file, line and reason."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One document. ``loss_mask[i]``: token i was written by the target and is learnt."""

    input_ids: Sequence[int]
    loss_mask: Sequence[bool]


def read_samples(path: Path, *, vocab_size: int, max_bad_share: float = 0.01) -> Iterator[Sample]:
    """Samples of a JSONL file of {"input_ids", "loss_mask"}; other keys are the caller's.

    Malformed lines are named, counted and skipped; more than ``max_bad_share`` of the file is a
    DataError that names the first ones.
    """
    bad: list[str] = []
    lines = 0
    with path.open("rb") as file:  # decoded line by line: a bad byte spoils its own line alone
        for number, line in enumerate(file, start=1):
            lines += 1
            try:
                sample = _sample(line, vocab_size)
            except (ValueError, KeyError, TypeError) as error:
                bad.append(f"{path}:{number}: {error!r}")
                continue
            yield sample
    if len(bad) > max_bad_share * lines:
        raise DataError(f"{len(bad)} of {lines} lines are malformed:\n  " + "\n  ".join(bad[:10]))
    for line in bad:
        print(f"skipped {line}")


def _sample(line: bytes, vocab_size: int) -> Sample:
    record = json.loads(line)
    ids, mask = record["input_ids"], record["loss_mask"]
    if len(ids) != len(mask):
        raise ValueError(f"{len(ids)} input_ids but {len(mask)} loss_mask")
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]:
        raise ValueError(f"token id {wrong[0]!r} is not in 0..{vocab_size - 1}")
    if wrong := [m for m in mask if type(m) not in (bool, int) or m not in (0, 1)]:
        raise ValueError(f"loss_mask {wrong[0]!r} is not 0 or 1")
    if not any(a and b for a, b in zip(mask, mask[1:], strict=False)):
        raise ValueError("no two supervised tokens in a row, so no block can be trained on it")
    return Sample(ids, [bool(m) for m in mask])


def pack(samples: Iterable[Sample], length: int, *, seed: int) -> PackedRows:
    """Whole documents packed into rows of ``length`` tokens, longest first into the fullest row
    that has room (best fit); documents longer than a row are cut. Rows come shuffled by ``seed``.

    Raises DataError where there is no sample at all.
    """
    documents = sorted(samples, key=lambda sample: -len(sample.input_ids))
    if not documents:
        raise DataError("there are no samples to pack")
    rows: list[list[Sample]] = []
    by_room: dict[int, list[int]] = {}  # free tokens -> rows
    rooms = np.zeros(length + 1, bool)
    for sample in documents:
        size = min(len(sample.input_ids), length)
        fitting = np.flatnonzero(rooms[size:])
        if fitting.size:
            room = size + int(fitting[0])
            row = by_room[room].pop()
            rooms[room] = bool(by_room[room])
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(sample)
        by_room.setdefault(room - size, []).append(row)
        rooms[room - size] = True

    shape = (len(rows), length)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    positions, loss_mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for place, row in enumerate(np.random.default_rng(seed).permutation(len(rows))):
        at = 0
        for number, sample in enumerate(rows[row], start=1):
            size = min(len(sample.input_ids), length)
            here = slice(at, at + size)
            tokens[place, here] = sample.input_ids[:size]
            segments[place, here] = number
            positions[place, here] = np.arange(size)
            loss_mask[place, here] = sample.loss_mask[:size]
            at += size
    return PackedRows(tokens, segments, positions, loss_mask)  # pyright: ignore[reportArgumentType]
