"""Packing of documents into rows, in memory and on disk."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.packing import PackedDataset, pack, write_packed
from train.rows import PackedRows
from train.samples import DataError, Sample, Tally, has_anchor

LENGTH = 10
WIDEST = 34
few = settings(max_examples=30)  # each writes files
documents = st.lists(st.integers(1, WIDEST), min_size=1, max_size=25)


def samples_of(sizes: list[int]) -> list[Sample]:
    """Token ids that say which document and place they are of; the first is long enough to stay."""
    mask = np.random.default_rng(len(sizes)).random((len(sizes) + 1, WIDEST)) < 0.6
    mask[0] = True
    return [
        Sample("", np.arange(size, dtype=np.int32) + 100 * d, mask[d, :size])
        for d, size in enumerate([12, *sizes])
    ]


def chunks(samples: list[Sample]) -> list[tuple[list[int], list[bool]]]:
    """(tokens, loss mask) of every row's length of every document, by the definition."""
    return [
        (s.input_ids[at : at + LENGTH].tolist(), s.loss_mask[at : at + LENGTH].tolist())
        for s in samples
        for at in range(0, len(s.input_ids), LENGTH)
    ]


def unpacked(rows: PackedRows) -> list[tuple[list[int], list[bool]]]:
    """The documents of packed rows; checks that each is contiguous, that its positions begin at 0
    and that padding is empty and last."""
    found: dict[tuple[int, int], tuple[list[int], list[bool]]] = defaultdict(lambda: ([], []))
    for row, column in np.ndindex(rows.tokens.shape):
        segment = int(rows.segments[row, column])
        if segment == 0:
            assert not rows.segments[row, column:].any()
            assert not rows.tokens[row, column] and not rows.loss_mask[row, column]
            assert not rows.positions[row, column]
            continue
        assert column == 0 or segment - rows.segments[row, column - 1] in (0, 1)
        tokens, mask = found[row, segment]
        assert rows.positions[row, column] == len(tokens)
        tokens.append(int(rows.tokens[row, column]))
        mask.append(bool(rows.loss_mask[row, column]))
    for row in range(len(rows.tokens)):
        numbers = [s for r, s in found if r == row]
        assert numbers == list(range(1, len(numbers) + 1)) and numbers
    return list(found.values())


@few
@given(documents, st.integers(0, 3))
def test_packing_keeps_every_token_once(sizes: list[int], seed: int) -> None:
    """Of every document that a block can be trained on, whole or cut into rows' lengths."""
    samples = samples_of(sizes)
    dataset = pack(samples, LENGTH, seed=seed)
    rows = dataset[:]
    assert {x.shape for x in vars(rows).values()} == {(len(dataset), LENGTH)}
    assert [x.dtype for x in vars(rows).values()] == [np.int32] * 3 + [bool]
    every = chunks(samples)
    kept = [chunk for chunk in every if has_anchor(np.array(chunk[1]))]
    assert sorted(unpacked(rows)) == sorted(kept)
    meta = dataset.meta
    assert meta.documents == len(kept) and meta.dropped == len(every) - len(kept)
    assert meta.split == sum(len(s.input_ids) > LENGTH for s in samples)
    assert meta.tokens == sum(len(tokens) for tokens, _ in kept) == (rows.segments > 0).sum()
    assert meta.supervised == rows.loss_mask.sum()


@few
@given(documents)
def test_packing_is_best_fit(sizes: list[int]) -> None:
    """As full as by the plain algorithm: longest first, into the least room that suffices."""
    samples = samples_of(sizes)
    kept = [len(tokens) for tokens, mask in chunks(samples) if has_anchor(np.array(mask))]
    rows: list[list[int]] = []
    for size in sorted(kept, reverse=True):
        fitting = [row for row in rows if LENGTH - sum(row) >= size]
        row = min(fitting, key=lambda row: LENGTH - sum(row), default=None)
        if row is None:
            rows.append(row := [])
        row.append(size)
    packed = pack(samples, LENGTH, seed=0)
    assert sorted((packed.segments > 0).sum(1)) == sorted(map(sum, rows))


@few
@given(documents)
def test_packing_depends_on_the_seed_alone(sizes: list[int]) -> None:
    one, same, other = (pack(samples_of(sizes), LENGTH, seed=seed) for seed in (1, 1, 2))
    assert one.meta == same.meta
    for name, value in vars(one[:]).items():
        np.testing.assert_array_equal(value, getattr(same[:], name))
    as_set = lambda rows: sorted(map(tuple, rows.tokens.tolist()))  # noqa: E731
    assert as_set(one) == as_set(other)


@few
@given(documents, st.data())
def test_rows_by_number(sizes: list[int], data: st.DataObject) -> None:
    dataset = pack(samples_of(sizes), LENGTH, seed=0)
    numbers = data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1))
    some, every = dataset[np.array(numbers)], dataset[:]
    for name, value in vars(some).items():
        np.testing.assert_array_equal(value, getattr(every, name)[numbers])


def test_a_folder_is_the_same_as_memory(tmp_path: Path) -> None:
    samples = samples_of([3, 9, 30, 4, 4])
    tally = Tally(lines=9, bad=2)
    written = write_packed(tmp_path / "a" / "b", iter(samples), LENGTH, seed=3, tally=tally)
    opened, packed = PackedDataset.open(tmp_path / "a" / "b"), pack(samples, LENGTH, seed=3)
    assert written.meta == opened.meta
    assert (opened.meta.lines, opened.meta.bad_lines) == (9, 2)
    assert dataclasses.replace(opened.meta, lines=0, bad_lines=0) == packed.meta
    assert isinstance(opened.tokens, np.memmap) and not isinstance(packed.tokens, np.memmap)
    for name, value in vars(packed[:]).items():
        np.testing.assert_array_equal(value, getattr(opened[:], name))
    names = sorted(path.name for path in (tmp_path / "a" / "b").iterdir())
    assert names == ["loss_mask.npy", "meta.json", "segments.npy", "tokens.npy"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_the_fingerprint_is_of_content_length_and_order() -> None:
    samples = [
        Sample("", s.input_ids, np.ones(len(s.input_ids), bool)) for s in samples_of([9] * 9)
    ]
    changed = [dataclasses.replace(s, input_ids=s.input_ids.copy()) for s in samples]
    changed[0].input_ids[-1] += 1
    unmasked = [dataclasses.replace(s, loss_mask=s.loss_mask.copy()) for s in samples]
    unmasked[0].loss_mask[-1] ^= True
    prints = [
        pack(samples, LENGTH, seed=0).meta.fingerprint,
        pack(samples, LENGTH + 1, seed=0).meta.fingerprint,
        pack(samples, LENGTH, seed=1).meta.fingerprint,
        pack(samples[:-1], LENGTH, seed=0).meta.fingerprint,
        pack(changed, LENGTH, seed=0).meta.fingerprint,
        pack(unmasked, LENGTH, seed=0).meta.fingerprint,
    ]
    assert len(set(prints)) == len(prints)


def test_nothing_to_pack_is_an_error(tmp_path: Path) -> None:
    useless = Sample("", np.arange(5, dtype=np.int32), np.array([1, 0, 1, 0, 1], bool))
    with pytest.raises(DataError, match=r"no samples to pack \(0 dropped\)"):
        pack([], LENGTH, seed=0)
    with pytest.raises(DataError, match=r"no samples to pack \(1 dropped\)"):
        write_packed(tmp_path / "a", [useless], LENGTH, seed=0)
    assert not list(tmp_path.iterdir())


def test_a_reading_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[Sample]:
        yield from samples_of([3])
        raise DataError("too many lines are malformed")

    with pytest.raises(DataError, match="too many lines"):
        write_packed(tmp_path / "a", failing(), LENGTH, seed=0)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_no_dataset_and_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / "a.partial"
    left.mkdir()
    (left / "tokens.flat").write_bytes(b"123")
    with pytest.raises(DataError, match="holds no packed rows"):
        PackedDataset.open(tmp_path / "a")
    write_packed(tmp_path / "a", samples_of([3]), LENGTH, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_exists_is_not_replaced(tmp_path: Path) -> None:
    write_packed(tmp_path / "a", samples_of([3]), LENGTH, seed=0)
    with pytest.raises(DataError, match="exists; open it, or remove it"):
        write_packed(tmp_path / "a", samples_of([4]), LENGTH, seed=0)


@pytest.mark.parametrize("damage", ["missing", "cut", "no json", "other keys", "other rows"])
def test_a_damaged_folder_is_named(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "a"
    write_packed(folder, samples_of([3]), LENGTH, seed=0)
    meta = json.loads((folder / "meta.json").read_bytes())
    if damage == "missing":
        (folder / "tokens.npy").unlink()
    elif damage == "cut":
        (folder / "tokens.npy").write_bytes((folder / "tokens.npy").read_bytes()[:-4])
    elif damage == "no json":
        (folder / "meta.json").write_text("{")
    else:
        meta |= {"rows": 99} if damage == "other rows" else {"colour": "blue"}
        (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match=f"{folder}"):
        PackedDataset.open(folder)
