"""Checkpoints of a training run: written behind its back, proven whole when read, never mixed up
with another run's."""

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from train.checksum import checksums, element_bits
from train.files import write_whole

CONTRACT = "contract.json"

_READERS = 16  # arrays read at a time: enough for a disk, and few of them twice in memory


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or written; the message names the folder and the reason."""


class ContractError(CheckpointError):
    """The folder's checkpoints belong to another run; the message names every differing field."""


class Checkpoints:
    """The checkpoints of one run in ``folder``: the last ``keep``, and the best by score.

    ``contract`` is nested plain JSON: all that must not change between a run and its resumption.
    It is stored by the first run and compared by every later one. Use as a context manager: leaving
    it waits for the save in flight. With several processes all of them make every call, over a
    file system that they share, and every leaf is a global array.

    Raises ContractError, CheckpointError.
    """

    def __init__(
        self,
        folder: Path,
        contract: Mapping[str, Any],
        *,
        keep: int = 2,
        report: Callable[[str], None] = print,
    ):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._folder, self._report = folder.absolute(), report
        self._records: dict[int, dict[str, Any]] = {}
        _check_contract(self._folder, contract)
        self._manager = ocp.CheckpointManager(
            self._folder,
            # The format is ours to read: Zarr arrays, all in one OCDBT key-value store.
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False),
                "record": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                cleanup_tmp_directories=True,  # what a killed run had not committed
                preservation_policy=_LastAndBest(keep, self._best_of),
            ),
        )
        for step in self.steps:
            try:
                self._records[step] = _read_record(self._step_folder(step), step)
            except _Damage:  # told when it is restored; until then it is nobody's best
                continue

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending; the one being written is among them."""
        return list(self._manager.all_steps())

    @property
    def best_step(self) -> int | None:
        """The step with the highest score, the later of equals; None where none has a score."""
        return self._best_of(self.steps)

    def save(self, step: int, state: Any, *, score: float | None = None) -> None:
        """Copy ``state`` to the host and write it in the background; higher scores are better.

        Waits for an earlier save, and raises what that one failed with. The state may be donated
        as soon as this returns. A step saved twice with the same bits is written once.

        Raises CheckpointError where ``step`` is taken by another state; TypeError on a leaf that
        is empty or no jax.Array of 8, 16 or 32 bit elements.
        """
        if score is not None and not math.isfinite(score):
            raise ValueError(f"the score of step {step} is {score}, it must be finite")
        arrays = _named(state)
        sums = checksums(arrays)
        leaves = {name: _leaf(x, sums[name]) for name, x in arrays.items()}
        if step in self.steps:
            if step not in self._records or self._records[step]["leaves"] != leaves:
                raise CheckpointError(f"{self._folder} already has another state of step {step}")
            return
        record = {"step": step, "score": score, "leaves": leaves}
        self._records[step] = record
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(arrays),  # flat, so that names are TensorStore's paths
                record=ocp.args.JsonSave({"record": record, "sha256": _digest(record)}),
            ),
            force=True,  # the caller alone decides when to save
        )

    def restore(self, abstract: Any, *, step: int | None = None) -> tuple[int, Any] | None:
        """(step, state) of the newest whole checkpoint, or None where there is none at all.

        ``abstract`` is the state's tree of jax.ShapeDtypeStruct with the shardings to restore to,
        on whatever mesh. Damaged checkpoints newer than the one used are reported and renamed to
        ``STEP.damaged``, so that their step can be saved again. With ``step``, that one or none.

        Raises CheckpointError: all are damaged, ``step`` is missing or damaged, or the leaves are
        not those of ``abstract``.
        """
        self.wait()
        wanted = _named(abstract)
        for name, leaf in wanted.items():
            if leaf.sharding is None:
                raise TypeError(f"{name} of the abstract state has no sharding")
        if step is not None and step not in self.steps:
            found = ", ".join(map(str, self.steps)) or "none"
            raise CheckpointError(f"{self._folder} has no checkpoint of step {step}; found {found}")
        damaged: dict[int, str] = {}
        for candidate in reversed(self.steps) if step is None else [step]:
            try:
                arrays = self._read(candidate, wanted)
            except _Damage as damage:
                damaged[candidate] = str(damage)
                continue
            self._set_aside(damaged, candidate)
            return candidate, jax.tree.unflatten(jax.tree.structure(abstract), arrays.values())
        if damaged:
            # They stay where they are: moved away, they would make the next run start afresh.
            why = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise CheckpointError(f"no whole checkpoint in {self._folder}: {why}")
        return None

    def wait(self) -> None:
        """Return when the save in flight is committed; raises what it failed with."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and end Orbax's threads whether or not the last save failed."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _step_folder(self, step: int) -> Path:
        return self._folder / str(step)

    def _best_of(self, steps: Sequence[int]) -> int | None:
        scores = {step: self._records[step]["score"] for step in steps if step in self._records}
        scored = [(score, step) for step, score in scores.items() if score is not None]
        return max(scored)[1] if scored else None

    def _read(self, step: int, wanted: dict[str, Any]) -> dict[str, jax.Array]:
        """Every process raises _Damage where any of them sees some: the others would otherwise
        wait for it in the next collective."""
        folder = self._step_folder(step)
        arrays, record, damage = {}, {}, None
        try:
            record = _read_record(folder, step)
            if not (different := _different(record["leaves"], wanted)):
                arrays = _read_arrays(folder / "state", wanted)
        except _Damage as caught:
            damage, different = caught, []
        if not _all_processes(damage is None):
            raise damage or _Damage("another process could not read its part")
        if different:
            raise CheckpointError(f"{folder} is of another state: {'; '.join(different)}")
        sums = checksums(arrays)
        broken = [name for name in wanted if sums[name] != record["leaves"][name]["checksum"]]
        if broken:
            raise _Damage(f"the values of {', '.join(broken)} are not those saved")
        return arrays

    def _set_aside(self, damaged: dict[int, str], used: int) -> None:
        for step, reason in damaged.items():
            self._records.pop(step, None)
            if jax.process_index() == 0:
                folder = self._step_folder(step)
                aside = folder.with_name(f"{step}.damaged")
                if aside.exists():  # of an earlier mishap
                    shutil.rmtree(aside)
                folder.rename(aside)
                self._report(
                    f"checkpoint {step} is damaged ({reason}); using the previous one, {used}. "
                    f"It is kept as {aside}"
                )
        if damaged:
            multihost_utils.sync_global_devices("damaged checkpoints set aside")
            self._manager.reload()


class _Damage(Exception):
    """Why one checkpoint is not whole."""


class _LastAndBest(policies.PreservationPolicy):
    def __init__(self, keep: int, best_of: Callable[[Sequence[int]], int | None]):
        self._keep, self._best_of = keep, best_of

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self._keep :], self._best_of(steps)}
        return [step in kept for step in steps]


def _leaf(x: Any, checksum: str) -> dict[str, Any]:
    return {"dtype": x.dtype.name, "shape": list(x.shape), "checksum": checksum}


def _check_contract(folder: Path, contract: Mapping[str, Any]) -> None:
    ours = json.loads(json.dumps(contract, allow_nan=False))  # tuples are lists there
    path = folder / CONTRACT
    if jax.process_index() == 0 and not path.exists() and not any(folder.glob("[0-9]*")):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(ours, indent=2) + "\n")
    multihost_utils.sync_global_devices("contract written")
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} has checkpoints, but {CONTRACT}, which tells whose they are, cannot be "
            f"read: {error}"
        ) from error
    before, now = dict(_flat(theirs)), dict(_flat(ours))
    different = [
        f"{name}: the checkpoints in {folder} "
        + (f"were made with {before[name]!r}" if name in before else "have no such field")
        + (f", this run has {now[name]!r}" if name in now else ", this run has none")
        for name in sorted(before.keys() | now.keys())
        if name not in before or name not in now or before[name] != now[name]
    ]
    if different:
        raise ContractError(
            "\n".join([*different, f"Choose another --work, or remove {folder} to start afresh."])
        )


def _flat(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        return [
            leaf
            for key, value in tree.items()
            for leaf in _flat(value, f"{name}.{key}" if name else key)
        ]
    return [(name, tree)]


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by their path, in the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError("two leaves of the state have the same path")
    for name, leaf in named.items():
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise TypeError(f"{name} is a {type(leaf).__name__}, it must be a jax.Array")
        if (bits := element_bits(leaf.dtype)) not in (8, 16, 32):
            hint = " (store jax.random.key_data of a key)" if bits == 0 else ""
            raise TypeError(f"{name} has dtype {leaf.dtype}{hint}, elements must be 8, 16, 32 bits")
        if leaf.size == 0:
            raise TypeError(f"{name} has shape {leaf.shape}, Orbax writes no empty array")
    return named


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_record(folder: Path, step: int) -> dict[str, Any]:
    try:
        with contextlib.closing(ocp.JsonCheckpointHandler()) as handler:
            stored = handler.restore(epath.Path(folder / "record"))
        record, digest = stored["record"], stored["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damage(f"its record cannot be read: {_brief(error)}") from error
    if _digest(record) != digest:
        raise _Damage("its record is not the one saved")
    if record["step"] != step:
        raise _Damage(f"it is of step {record['step']}")
    return record


def _read_arrays(folder: Path, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    """TensorStore on the files that Orbax wrote. Orbax's own restore would meet the other processes
    at a barrier that one with damage never reaches, raise bare Exceptions, and abandon the reads
    beside the one that failed, which then fill the screen."""
    context = tensorstore.Context()

    def read(name: str) -> jax.Array:
        spec = {
            "driver": "zarr",
            "kvstore": {
                "driver": "ocdbt",
                "base": {"driver": "file", "path": f"{folder}/"},
                "path": f"{name}/",
            },
            "fill_missing_data_reads": False,  # they would be zeros
        }
        leaf = wanted[name]
        stored = tensorstore.open(spec, context=context, open=True, dtype=leaf.dtype).result()
        shards: dict[str, np.ndarray] = {}

        def shard(index: Any) -> np.ndarray:  # asked for once a device
            if (key := str(index)) not in shards:
                shards[key] = stored[index].read().result()
            return shards[key]

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

    try:
        with ThreadPoolExecutor(_READERS) as pool:
            return dict(zip(wanted, pool.map(read, wanted), strict=True))
    except (OSError, ValueError, IndexError) as error:  # IndexError: a smaller shape than saved
        raise _Damage(_brief(error)) from error


def _brief(error: BaseException) -> str:
    first = str(error).partition(" [")[0].splitlines()
    return f"{type(error).__name__}: {first[0] if first else ''}"[:300]


def _different(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What of the state's make-up is not as it was saved: the program's doing, not the disk's."""
    now = {name: _leaf(leaf, "") for name, leaf in wanted.items()}
    return [
        f"{name} was "
        + (f"{saved[name]['dtype']}{saved[name]['shape']}" if name in saved else "not saved")
        + (f" and is {now[name]['dtype']}{now[name]['shape']}" if name in now else " and is gone")
        for name in sorted(saved.keys() | now.keys())
        if name not in saved or name not in now or saved[name] | {"checksum": ""} != now[name]
    ]


def _all_processes(yes: bool) -> bool:
    return bool(np.all(multihost_utils.process_allgather(np.bool_(yes))))
