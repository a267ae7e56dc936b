"""Batches: a function of the step, whole epochs, placed on a mesh, made ahead."""

import itertools
import sys
import threading
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.sharding import make_mesh
from train.batches import Batch, Batches
from train.packing import PackedDataset, pack
from train.samples import DataError, Sample


def dataset_of(rows: int) -> PackedDataset:
    """Rows of two documents, no two alike."""
    samples = [
        Sample("", np.arange(4, dtype=np.int32) + 10 * i, np.ones(4, bool)) for i in range(2 * rows)
    ]
    dataset = pack(samples, 9, seed=0)
    assert len(dataset) == rows
    return dataset


def placement(data: int = 2, model: int = 1, *axes: str | None) -> NamedSharding:
    return NamedSharding(make_mesh(data, model), PartitionSpec(*(axes or ("data",))))


def batches(rows: int, batch_rows: int, seed: int = 0, **options: Any) -> Batches:
    options = {"placement": placement(), **options}
    return Batches(dataset_of(rows), batch_rows, seed=seed, **options)


def first(count: int, made: Batches, start: int = 0) -> list[Batch]:
    return list(itertools.islice(made.iterate(start), count))


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert [batch.step for batch in left] == [batch.step for batch in right]
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a.rows_index, b.rows_index)
        jax.tree.map(np.testing.assert_array_equal, a.rows, b.rows)


def test_a_resumed_run_gets_the_batches_of_an_uninterrupted_one() -> None:
    """From every step, those within an epoch and those over two."""
    whole = first(9, batches(7, 4))
    assert [batch.step for batch in whole] == list(range(9))
    for start in range(9):
        assert_same(first(9 - start, batches(7, 4), start), whole[start:])


def test_a_row_a_step() -> None:
    made = batches(3, 1, placement=placement(1))
    rows = [int(batch.rows_index[0]) for batch in first(3, made)]
    assert sorted(rows) == [0, 1, 2]


def test_steps_far_ahead() -> None:
    (batch,) = first(1, batches(7, 4), 10**9)
    assert batch.step == 10**9
    np.testing.assert_array_equal(batch.rows_index, batches(7, 4).rows_index(10**9))


@settings(max_examples=10)  # grain shuffles a handful of rows slowly, a millisecond each
@given(st.integers(1, 12), st.data(), st.integers(0, 2**32 - 1))
def test_every_epoch_has_every_row_once(rows: int, data: st.DataObject, seed: int) -> None:
    batch_rows = data.draw(st.integers(1, rows))
    source = np.arange(rows)  # an array is a source too
    made = Batches(source, batch_rows, seed=seed, placement=placement(1))
    drawn = np.concatenate([made.rows_index(step) for step in range(2 * rows)])
    for epoch in range(2 * batch_rows):
        one = drawn[epoch * rows : (epoch + 1) * rows]
        assert sorted(one) == list(range(rows))


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return batches(30, 30, seed).rows_index(number).tolist()

    orders = [epoch(0, 0), epoch(0, 1), epoch(0, 2), epoch(7, 0), list(range(30))]
    assert len(set(map(tuple, orders))) == len(orders)
    # Pinned: a run that is resumed under another grain must find the same order.
    assert batches(8, 8).rows_index(0).tolist() == PINNED


PINNED = [0, 4, 6, 7, 5, 3, 1, 2]


@pytest.mark.parametrize(
    ("data", "model", "axes"),
    [
        (1, 1, ("data",)),
        (4, 1, ("data",)),
        (2, 2, ("data",)),
        (1, 4, ()),
        (2, 2, (("data", "model"),)),
    ],
)
def test_rows_are_placed_as_asked(data: int, model: int, axes: tuple[Any, ...]) -> None:
    where = NamedSharding(make_mesh(data, model), PartitionSpec(*axes))
    dataset = dataset_of(6)
    for batch in first(3, Batches(dataset, 4, seed=1, placement=where)):
        expected = dataset[batch.rows_index]
        for name, array in vars(batch.rows).items():
            assert isinstance(array, jax.Array) and array.sharding == where
            np.testing.assert_array_equal(array, getattr(expected, name))
            assert array.dtype == getattr(expected, name).dtype


def test_a_second_axis_may_be_split_too() -> None:
    where = NamedSharding(make_mesh(2, 2), PartitionSpec("data", "model"))
    source = np.arange(6 * 8).reshape(6, 8)
    (batch,) = first(1, Batches(source, 4, seed=1, placement=where))
    assert batch.rows.sharding == where
    np.testing.assert_array_equal(batch.rows, source[batch.rows_index])


class WithFeatures:
    """Rows with something more for each; remembers what was read."""

    def __init__(self, rows: int) -> None:
        self.dataset, self.read = dataset_of(rows), []

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        self.read.append(rows.tolist())
        features = np.zeros((len(rows), 9, 3), np.float32) + rows[:, None, None]
        return self.dataset[rows], features


def test_a_row_may_have_more_than_tokens_and_is_read_once() -> None:
    source = WithFeatures(6)
    made = Batches(source, 4, seed=0, placement=placement(2, 2))
    (batch,) = first(1, made)
    rows, features = batch.rows
    np.testing.assert_array_equal(rows.tokens, source.dataset[batch.rows_index].tokens)
    assert features.shape == (4, 9, 3)
    np.testing.assert_array_equal(features[:, 0, 0], batch.rows_index)
    # Two shards of rows, each on two devices.
    assert source.read[:2] == [batch.rows_index[:2].tolist(), batch.rows_index[2:].tolist()]


def test_batches_are_made_ahead_on_another_thread_and_no_further() -> None:
    made_on: list[int] = []
    three = threading.Event()

    class Source(WithFeatures):
        def __getitem__(self, rows: np.ndarray) -> tuple[Any, np.ndarray]:
            made_on.append(threading.get_ident())
            if len(made_on) == 3:
                three.set()
            return super().__getitem__(rows)

    ahead = Batches(Source(6), 4, seed=0, placement=placement(1)).iterate()
    next(ahead)
    assert three.wait(20)  # the one in use and two beside it
    assert len(made_on) == 3 and threading.get_ident() not in made_on
    ahead.close()


def test_what_reading_raises_reaches_the_loop() -> None:
    class Source(WithFeatures):
        def __getitem__(self, rows: np.ndarray) -> tuple[Any, np.ndarray]:
            raise DataError("the disk is gone")

    with pytest.raises(DataError, match="the disk is gone"):
        first(1, Batches(Source(6), 4, seed=0, placement=placement()))


def test_fewer_rows_than_a_batch_is_an_error() -> None:
    with pytest.raises(DataError, match="3 packed rows are fewer than batch_rows 4"):
        batches(3, 4)


def test_without_grain_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grain", None)  # as if it were not there
    with pytest.raises(DataError, match=r"batches need grain: pip install 'dflash_jax\[train\]'"):
        batches(8, 4)
