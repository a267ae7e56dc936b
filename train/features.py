"""Target features from disk: what the target would compute in every step, computed once.

An option for targets that are dear and data that is seen often: a token costs n * D * 2 bytes
(40 KiB for Qwen3-8B). The default is to compute features in the step itself, on the same mesh.
One file a packed row, so that rows are read in any order.
"""

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils

from dflash_jax.decoder import Pair
from dflash_jax.functional import Params
from train.attention import TILES, Tiles, forward_on
from train.batches import on_mesh
from train.files import write_whole
from train.objective import target_output
from train.packing import PackedDataset
from train.rows import PackedRows, TrainingRows
from train.samples import DataError
from train.stacked import FrozenTarget
from train.step import rows_placement

META = "features.json"


class RowsWithFeatures:
    """Packed rows, with the features that ``write_features`` left in ``folder`` where one is given.

    ``contract``: what the features must have been made from. Raises DataError naming what differs
    or which row has no file.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        folder: Path | None = None,
        contract: Mapping[str, Any] | None = None,
    ):
        self._dataset, self._folder = dataset, folder
        if folder is None:
            return
        _check(folder, contract or {})
        missing = [row for row in range(len(dataset)) if not _path(folder, row).is_file()]
        if missing:
            raise DataError(
                f"{folder} lacks the features of {len(missing)} of {len(dataset)} rows, the first "
                f"of row {missing[0]}; write_features writes what is missing"
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, rows: np.ndarray, /) -> TrainingRows:
        packed = self._dataset[rows]
        if self._folder is None:
            return TrainingRows(packed, None)
        features = np.stack([_read(_path(self._folder, int(row))) for row in rows])
        return TrainingRows(packed, features)  # pyright: ignore[reportArgumentType]


def write_features(
    pair: Pair,
    target: Params,
    dataset: PackedDataset,
    folder: Path,
    contract: Mapping[str, Any],
    *,
    batch_rows: int,
    tiles: Tiles = TILES,
    report: Callable[[str], None] = print,
) -> None:
    """Write every row's features, from the very weights that will be served (stacked). Rows that
    have a file already are left alone, so a run that was killed goes on.

    ``contract``: plain JSON of what the features depend on, checked by every later use. With
    several processes each writes the rows that its devices hold, to a folder that all share.
    Raises DataError where the folder's features were made from something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meta = folder / META
    if jax.process_index() == 0 and not meta.exists():
        write_whole(meta, json.dumps(contract, indent=2))
    multihost_utils.sync_global_devices("features begin")
    _check(folder, contract)
    frozen, taps, placement = FrozenTarget.of(pair), pair.taps, rows_placement(pair)
    forward = forward_on(pair.sharding.mesh)

    @partial(jax.jit, out_shardings=placement)  # rows whole: a shard is written as it is
    def features_of(rows: PackedRows, params: Params):
        return target_output(frozen.bind(params), rows, taps, tiles, forward).features

    todo = [row for row in range(len(dataset)) if not _path(folder, row).is_file()]
    multihost_utils.sync_global_devices("features counted")
    for at in range(0, len(todo), batch_rows):
        wanted = todo[at : at + batch_rows]
        numbers = np.array(wanted + wanted[-1:] * (batch_rows - len(wanted)))  # one shape for all
        features = features_of(on_mesh(dataset[numbers], placement), target)
        for shard in features.addressable_shards:
            if shard.replica_id == 0:
                places = range(*shard.index[0].indices(batch_rows))
                for place, values in zip(places, np.asarray(shard.data), strict=True):
                    if place < len(wanted):  # what fills up the last batch has its file already
                        _write(_path(folder, wanted[place]), values)
        report(f"features of {at + len(wanted)} of {len(todo)} rows")
    multihost_utils.sync_global_devices("features written")


def _path(folder: Path, row: int) -> Path:
    return folder / f"{row // 1000:05d}" / f"{row:08d}.npz"


def _write(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(exist_ok=True)
    bits = values.view(np.uint16) if values.dtype == ml_dtypes.bfloat16 else values
    unfinished = path.with_suffix(f".{jax.process_index()}-{os.getpid()}.tmp")
    with unfinished.open("wb") as file:
        np.savez(file, bits=bits, dtype=values.dtype.name)
    unfinished.replace(path)


def _read(path: Path) -> np.ndarray:
    """Raises DataError naming a file that is no features."""
    try:
        with path.open("rb") as file, np.load(file) as stored:
            return stored["bits"].view(jnp.dtype(str(stored["dtype"])))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} holds no features: {error}") from error


def _check(folder: Path, contract: Mapping[str, Any]) -> None:
    try:
        found = json.loads((folder / META).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} holds no features: {error}") from error
    wanted = json.loads(json.dumps(contract))
    names = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
    if names:
        listed = "; ".join(f"{k}: {found.get(k)!r}, now {wanted.get(k)!r}" for k in names)
        raise DataError(f"the features in {folder} were made from something else: {listed}")
