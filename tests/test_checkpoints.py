"""Checkpoints: bit for bit on any mesh, and nothing else, whatever happens to their files."""

import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.sharding import make_mesh
from train.checkpoints import CheckpointError, Checkpoints, ContractError
from train.checksum import checksums

CONTRACT = {"seed": 0, "objective": {"gamma": 7.0, "anchors": 512}, "taps": (1, 9)}
ROOT = Path(__file__).parent.parent


def place(tree: Any, data: int = 1, model: int = 1) -> Any:
    """On a mesh, with the dims split that can be."""
    mesh = make_mesh(data, model)

    def sharding(x: jax.Array) -> NamedSharding:
        axes = ("data", "model")[: x.ndim]
        fits = (a if n % mesh.shape[a] == 0 else None for a, n in zip(axes, x.shape, strict=False))
        return NamedSharding(mesh, PartitionSpec(*fits))

    return jax.tree.map(lambda x: jax.device_put(x, sharding(x)), tree)


def state_of(step: int, data: int = 1, model: int = 1) -> dict[str, Any]:
    """What a run holds, with values that arithmetic would not carry over: NaNs, -0, denormals."""
    random = np.random.default_rng(step)
    anything = random.integers(0, 2**32, (64, 48), np.uint32).view(np.float32)
    params = {"layers.0.w": jnp.asarray(anything), "norm": jnp.arange(8, dtype=jnp.bfloat16)}
    state = {
        "params": params,
        "optimizer": optax.chain(optax.clip(1.0), optax.scale_by_adam()).init(params),
        "key": jax.random.key_data(jax.random.key(step)),
        "step": jnp.int32(step),
        "flags": (jnp.array([True, False]), jnp.int8(-1), None),
    }
    return place(state, data, model)


def abstract_of(state: Any, data: int = 1, model: int = 1) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        place(state, data, model),
    )


def assert_same(state: Any, expected: Any) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def open_quietly(folder: Path, **options: Any) -> Checkpoints:
    return Checkpoints(folder, CONTRACT, report=lambda line: None, **options)


@pytest.mark.parametrize(
    ("before", "after"), [((1, 1), (2, 2)), ((2, 2), (1, 4)), ((4, 1), (1, 1))]
)
def test_bit_for_bit_onto_another_mesh(before, after, tmp_path, capfd):
    state = state_of(5, *before)
    with Checkpoints(tmp_path, CONTRACT) as checkpoints:
        assert checkpoints.restore(abstract_of(state)) is None
        checkpoints.save(5, state)
        jax.tree.map(lambda x: x.delete(), state)  # as donation does
    wanted = abstract_of(state_of(5), *after)
    with Checkpoints(tmp_path, CONTRACT) as checkpoints:
        found = checkpoints.restore(wanted)
    assert found is not None and found[0] == 5
    assert_same(found[1], state_of(5))
    jax.tree.map(lambda x, y: x.sharding == y.sharding or pytest.fail(), found[1], wanted)
    assert capfd.readouterr() == ("", "")


def test_the_last_and_the_best_stay(tmp_path):
    scores = {1: 2.0, 2: 3.5, 3: 1.0, 4: None, 5: 3.0, 6: 0.5}
    with Checkpoints(tmp_path, CONTRACT, keep=2) as checkpoints:
        assert checkpoints.best_step is None
        for step, score in scores.items():
            checkpoints.save(step, state_of(step), score=score)
        assert (checkpoints.steps, checkpoints.best_step) == ([2, 5, 6], 2)
    with Checkpoints(tmp_path, CONTRACT, keep=1) as checkpoints:
        assert (checkpoints.steps, checkpoints.best_step) == ([2, 5, 6], 2)
        found = checkpoints.restore(abstract_of(state_of(0)), step=2)
        assert found is not None
        assert_same(found[1], state_of(2))
        checkpoints.save(7, state_of(7), score=3.5)  # as good, and later
    with Checkpoints(tmp_path, CONTRACT) as checkpoints:
        assert (checkpoints.steps, checkpoints.best_step) == ([7], 7)
    assert {path.name for path in tmp_path.iterdir()} == {"7", "contract.json"}


def test_a_step_is_written_once(tmp_path):
    with Checkpoints(tmp_path, CONTRACT) as checkpoints:
        checkpoints.save(3, state_of(3))
        checkpoints.save(3, state_of(3, 2, 2))
        with pytest.raises(CheckpointError, match="already has another state of step 3"):
            checkpoints.save(3, state_of(4))
        with pytest.raises(ValueError, match="score of step 4 is nan"):
            checkpoints.save(4, state_of(4), score=float("nan"))


def test_contract_names_every_field(tmp_path):
    with Checkpoints(tmp_path, CONTRACT):
        pass
    changed = {"seed": 0, "objective": {"gamma": 4.0, "alpha": 0.5}, "taps": [1, 8]}
    with pytest.raises(ContractError) as caught:
        Checkpoints(tmp_path, changed)
    *lines, advice = str(caught.value).splitlines()
    assert lines == [
        f"objective.alpha: the checkpoints in {tmp_path} have no such field, this run has 0.5",
        f"objective.anchors: the checkpoints in {tmp_path} were made with 512, this run has none",
        f"objective.gamma: the checkpoints in {tmp_path} were made with 7.0, this run has 4.0",
        f"taps: the checkpoints in {tmp_path} were made with [1, 9], this run has [1, 8]",
    ]
    assert "--work" in advice and str(tmp_path) in advice


def test_contract_lost(tmp_path):
    with Checkpoints(tmp_path, CONTRACT) as checkpoints:
        checkpoints.save(1, state_of(1))
    for spoil in (lambda path: path.write_text("{"), Path.unlink):
        spoil(tmp_path / "contract.json")
        with pytest.raises(CheckpointError, match="has checkpoints, but contract.json"):
            Checkpoints(tmp_path, CONTRACT)


def test_another_make_up_is_no_damage(tmp_path):
    with Checkpoints(tmp_path, CONTRACT) as checkpoints:
        checkpoints.save(1, state_of(1))
        other = abstract_of(state_of(1) | {"more": jnp.ones(2), "step": jnp.float32(1)})
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(other)
        assert "more was not saved and is float32[2]" in str(caught.value)
        assert "step was int32[] and is float32[]" in str(caught.value)
        with pytest.raises(CheckpointError, match="no checkpoint of step 2; found 1"):
            checkpoints.restore(other, step=2)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (3, "x/y is a int, it must be a jax.Array"),
        (jax.random.key(0), r"x/y has dtype key<fry> \(store jax.random.key_data"),
        (jnp.zeros((0, 3)), r"x/y has shape \(0, 3\)"),
        (jnp.ones(2, jnp.complex64), "x/y has dtype complex64"),
    ],
)
def test_leaves_that_cannot_be_saved(leaf, message, tmp_path):
    with Checkpoints(tmp_path, CONTRACT) as checkpoints, pytest.raises(TypeError, match=message):
        checkpoints.save(1, {"x": {"y": leaf}})


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_steps") / "checkpoints"
    with Checkpoints(folder, CONTRACT) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step, 2, 2), score=float(step))
    return folder


def files_of(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def restored_after(change: Any, file: str, source: Path, folder: Path) -> int:
    """The step found after ``change`` to the newest one's ``file``; its state must be exact."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    change(folder / "2" / file)
    told: list[str] = []
    with Checkpoints(folder, CONTRACT, report=told.append) as checkpoints:
        found = checkpoints.restore(abstract_of(state_of(0)))
        assert found is not None
        step, state = found
        assert_same(state, state_of(step))
        assert checkpoints.steps == ([1, 2] if step == 2 else [1])
        if step == 1:
            assert told[0].startswith("checkpoint 2 is damaged (") and "previous one, 1" in told[0]
            assert (folder / "2.damaged").exists()
    return step


def test_every_file_cut_and_removed(two_steps, tmp_path):
    def cut(path: Path, size: float) -> None:
        path.write_bytes(path.read_bytes()[: int(size)])

    needed = set()
    for file in files_of(two_steps / "2"):
        size = (two_steps / "2" / file).stat().st_size
        for change in (
            Path.unlink,
            lambda path, size=size: cut(path, size / 2),
            lambda path, size=size: cut(path, size - 1),
        ):
            if restored_after(change, file, two_steps, tmp_path / "cut") == 1:
                needed.add(file)
    # The others are Orbax's copies, and what only its own restore reads.
    assert {"record/metadata", "state/manifest.ocdbt"} <= needed
    assert any(file.startswith("state/ocdbt.process_0/d/") for file in needed)


def test_flipped_bits(two_steps, tmp_path):
    @settings(max_examples=30, derandomize=True)
    @given(st.sampled_from(files_of(two_steps / "2")), st.floats(0, 1, exclude_max=True))
    def check(file: str, at: float) -> None:
        def flip(path: Path) -> None:
            content = bytearray(path.read_bytes())
            content[int(at * len(content))] ^= 1 << int(at * 997) % 8
            path.write_bytes(content)

        restored_after(flip, file, two_steps, tmp_path / "flip")

    check()


def test_flipped_bits_of_data_are_always_seen(two_steps, tmp_path):
    """Orbax reads these without a complaint."""
    [largest] = sorted(
        files_of(two_steps / "2"), key=lambda file: (two_steps / "2" / file).stat().st_size
    )[-1:]

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    assert restored_after(flip, largest, two_steps, tmp_path / "flip") == 1


def test_the_damaged_step_can_be_saved_again(two_steps, tmp_path):
    folder = tmp_path / "again"
    restored_after(Path.unlink, "record/metadata", two_steps, folder)
    with open_quietly(folder) as checkpoints:
        assert checkpoints.best_step == 1
        checkpoints.save(2, state_of(2), score=0.0)
    with open_quietly(folder) as checkpoints:
        found = checkpoints.restore(abstract_of(state_of(0)))
        assert found is not None and found[0] == 2


def test_nothing_whole_is_no_fresh_start(two_steps, tmp_path):
    folder = tmp_path / "all"
    shutil.copytree(two_steps, folder)
    for step in ("1", "2"):
        shutil.rmtree(folder / step / "state")
    for _ in range(2):  # the second try must not start afresh either
        with open_quietly(folder) as checkpoints:
            with pytest.raises(CheckpointError, match="no whole checkpoint in .*step 2: .*step 1"):
                checkpoints.restore(abstract_of(state_of(0)))
            with pytest.raises(CheckpointError, match="no whole checkpoint"):
                checkpoints.restore(abstract_of(state_of(0)), step=1)


def test_an_uncommitted_save_is_no_checkpoint(two_steps, tmp_path):
    folder = tmp_path / "killed"
    shutil.copytree(two_steps, folder)
    (folder / "2").rename(folder / "3.orbax-checkpoint-tmp")
    with open_quietly(folder) as checkpoints:
        assert checkpoints.steps == [1]
        checkpoints.save(3, state_of(3))
    assert {path.name for path in folder.iterdir()} == {"1", "3", "contract.json"}


@given(
    st.lists(st.integers(0, 255), min_size=6, max_size=6, unique=True),
    st.permutations(range(6)),
    st.integers(0, 7),
)
def test_checksum_sees_bits_and_places(values, order, bit):
    x = np.array(values, np.uint8).reshape(2, 3)
    moved = x.ravel()[list(order)].reshape(2, 3)
    changed = x ^ np.uint8([[1 << bit, 0, 0], [0, 0, 0]])
    sums = checksums({"x": jnp.asarray(x), "m": jnp.asarray(moved), "c": jnp.asarray(changed)})
    assert (sums["m"] == sums["x"]) == (x == moved).all()
    assert sums["c"] != sums["x"]


def test_checksum_does_not_see_the_mesh():
    x = {"x": jnp.arange(64 * 8, dtype=jnp.float32).reshape(64, 8)}
    assert checksums(place(x, 2, 2)) == checksums(place(x, 1, 4)) == checksums(x)


# One device, a state that tells its step, a checkpoint every third step.
LOOP = """
import sys, time
from pathlib import Path
import jax, jax.numpy as jnp
from train.checkpoints import Checkpoints
from train.preemption import Preemption
state = {"w": jnp.zeros((256, 256)), "step": jnp.int32(0)}
abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
)
with Preemption() as preemption, Checkpoints(Path(sys.argv[1]), {"seed": 0}) as checkpoints:
    found = checkpoints.restore(abstract)
    first, state = found if found else (0, state)
    print("from", first, float(state["w"][0, 0]), flush=True)
    for step in range(first + 1, 1000):
        state = jax.tree.map(lambda x: x + 1, state)
        stop = preemption.requested(step)
        if stop or step % 3 == 0:
            checkpoints.save(step, state)
        print("step", step, flush=True)
        if stop:
            break
        time.sleep(0.02)
print("stopped", step, flush=True)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sigterm_and_kill(tmp_path):
    def run_until(step: int, sent: signal.Signals) -> tuple[int, list[str], str]:
        with start(LOOP, tmp_path) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line.strip())
                if lines[-1] == f"step {step}":
                    process.send_signal(sent)
            assert process.stderr is not None
            return process.wait(), lines, process.stderr.read()

    code, lines, error = run_until(7, signal.SIGTERM)
    assert (code, error) == (0, "")
    stopped = int(lines[-1].removeprefix("stopped "))
    assert lines[0] == "from 0 0.0" and stopped in (8, 9)

    code, lines, _ = run_until(stopped + 20, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert lines[0] == f"from {stopped} {stopped:.1f}"

    wanted = abstract_of({"w": jnp.zeros((256, 256)), "step": jnp.int32(0)}, 2, 2)
    with Checkpoints(tmp_path, {"seed": 0}) as checkpoints:
        found = checkpoints.restore(wanted)
    assert found is not None
    step, state = found
    assert step % 3 == 0 and step > stopped + 10
    assert int(state["step"]) == step and (np.asarray(state["w"]) == step).all()


def test_a_failed_save_is_raised_by_the_next(tmp_path):
    big = {"w": jnp.asarray(np.random.default_rng(0).standard_normal(500_000, np.float32))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, CONTRACT) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(4)})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        try:
            checkpoints.save(2, big)
            with pytest.raises(Exception, match="File too large"):
                checkpoints.save(3, {"w": jnp.ones(4)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert checkpoints.steps == [1]
        checkpoints.save(2, big)
    with Checkpoints(tmp_path, CONTRACT) as checkpoints:
        assert checkpoints.steps == [1, 2]


# Two processes of one run: a part of each leaf in each. The damage is seen by one of them only.
TOGETHER = """
import os, signal, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
address, number, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.distributed.initialize(address, 2, number)
from jax.sharding import NamedSharding, PartitionSpec
from train.checkpoints import Checkpoints
from train.preemption import Preemption
split = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))
shape = (2, 5000)
value = lambda step: np.random.default_rng(step).standard_normal(shape, np.float32)
state = lambda step: {"w": jax.make_array_from_callback(shape, split, lambda at: value(step)[at])}
abstract = {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split)}
with Preemption() as preemption:
    with Checkpoints(folder, {}) as checkpoints:
        for step in range(1, 1000):
            checkpoints.save(step, state(step))
            if step == 3 and number == 1:
                os.kill(os.getpid(), signal.SIGINT)
            if preemption.requested(step):
                break
    print("stopped", step, flush=True)
    if number == 1:
        for path in (folder / str(step) / "state/ocdbt.process_1/d").iterdir():
            if path.stat().st_size > 10000:
                path.write_bytes(b"")
    jax.experimental.multihost_utils.sync_global_devices("damaged")
    with Checkpoints(folder, {}) as checkpoints:
        found, restored = checkpoints.restore(abstract)
    same = [np.array_equal(s.data, value(found)[s.index]) for s in restored["w"].addressable_shards]
    print("found", found, same, flush=True)
"""


def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [start(TOGETHER, address, number, tmp_path) for number in range(2)]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    told = ("stopped", "checkpoint", "found")  # Gloo has its own say on stdout
    lines = [[line for line in out.splitlines() if line.startswith(told)] for out, _ in outputs]
    step = int(lines[0][0].removeprefix("stopped "))
    assert lines[1] == [f"stopped {step}", f"found {step - 1} [True]"]
    assert lines[0][-1] == lines[1][-1]
    assert f"checkpoint {step} is damaged" in lines[0][1]
