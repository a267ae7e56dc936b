"""Batches of rows as a function of the step alone, on the mesh before they are asked for."""

import dataclasses
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from train.samples import DataError

Rows = TypeVar("Rows")
RowsOut = TypeVar("RowsOut", covariant=True)
PREFETCHED = 2  # batches on the device beside the one in use


class RowSource(Protocol[RowsOut]):
    """What batches are drawn from, a PackedDataset say. Indexed by row numbers [Z] it gives a
    pytree of numpy arrays [Z, ...]; what else belongs to a row can be one more leaf."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: np.ndarray, /) -> RowsOut: ...


@dataclasses.dataclass(frozen=True)
class Batch(Generic[Rows]):
    """``rows``: the source's pytree of rows ``rows_index`` [Z], as global arrays on the mesh."""

    step: int
    rows_index: np.ndarray
    rows: Rows


def on_mesh(rows: Rows, placement: NamedSharding) -> Rows:
    """A pytree of numpy arrays, whole in every process, as global arrays."""
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, placement, lambda index: x[index]), rows
    )


class Batches(Generic[Rows]):
    """An endless sequence of batches. Every epoch is a fresh permutation of the rows; what its end
    leaves over begins the next batch, so that no row is left out (and a batch over two epochs may
    hold a row twice).

    Batch s depends on (seed, s) alone: a run resumed at s gets what an uninterrupted one would, and
    every process of several reads the rows of its own shards and no others.

    batch_rows: global; ``placement`` must divide it over the rows' axis.
    seed: 0..2**32-1; epoch e is shuffled by seed + e.
    placement: of every array; the first axis is the rows'.

    Raises DataError where there are fewer rows than ``batch_rows``, or where grain is missing.
    """

    def __init__(
        self, dataset: RowSource[Rows], batch_rows: int, *, seed: int, placement: NamedSharding
    ) -> None:
        try:
            import grain
        except ModuleNotFoundError as error:
            raise DataError(
                f"batches need {error.name}: pip install 'dflash_jax[train]'"
            ) from error
        if len(dataset) < batch_rows:
            raise DataError(f"{len(dataset)} packed rows are fewer than batch_rows {batch_rows}")
        self._dataset, self._batch_rows, self._placement = dataset, batch_rows, placement
        self._by_rows = NamedSharding(placement.mesh, PartitionSpec(*placement.spec[:1]))
        order = grain.MapDataset.range(len(dataset)).shuffle(seed).repeat()
        # Nothing remains of an endless sequence, but without the flag grain takes its length for a
        # float, which in batches of 1 is more than an index holds.
        self._order = order.batch(batch_rows, drop_remainder=True)
        self._read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED)

    def rows_index(self, step: int) -> np.ndarray:
        """Which rows [Z] the batch of ``step`` has."""
        return np.asarray(self._order[step])

    def iterate(self, start_step: int = 0) -> Iterator[Batch[Rows]]:
        """Batches from ``start_step`` on, made ahead on a thread that ends with the iterator."""
        batches = self._order.map_with_index(self._batch)[start_step:]
        ahead = iter(batches.to_iter_dataset(self._read))
        try:
            yield from ahead
        finally:
            ahead.close()

    def _batch(self, step: int, rows_index: np.ndarray) -> Batch[Rows]:
        """Reads what this process's devices hold, once even where several hold the same."""
        size = self._batch_rows
        parts = {}
        for index in self._by_rows.addressable_devices_indices_map((size,)).values():
            assert index is not None
            if (part := index[0].indices(size)) not in parts:
                parts[part] = jax.tree.flatten(self._dataset[rows_index[index[0]]])
        leaves, structure = next(iter(parts.values()))

        def global_array(number: int, leaf: np.ndarray) -> jax.Array:
            def shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                leaves, _ = parts[index[0].indices(size)]
                return leaves[number][(slice(None), *index[1:])]

            shape = (size, *leaf.shape[1:])
            return jax.make_array_from_callback(shape, self._placement, shard)

        arrays = [global_array(number, leaf) for number, leaf in enumerate(leaves)]
        return Batch(step, np.asarray(rows_index), jax.tree.unflatten(structure, arrays))
