"""Training in a real process that is killed, signalled or finds a broken checkpoint: the same
command ends with the same losses and the same draft, bit for bit."""

import dataclasses
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_model import write_model
from training_process import SMALL, losses, start, write_data

STEPS, CHECKPOINT_EVERY = 60, 10
SETTINGS = (*SMALL, f"loop.steps={STEPS}", f"loop.checkpoint_every={CHECKPOINT_EVERY}")


@dataclasses.dataclass(frozen=True)
class Setup:
    """``inputs``: the folder of target, data and compiled programs, the same for all runs."""

    inputs: Path

    def start(self, work: Path) -> tuple[subprocess.Popen[bytes], Path]:
        work.mkdir(exist_ok=True)
        log = work / "log.txt"
        command = ["train", "smollm2", "--work", work, "--target", self.inputs / "target"]
        command += ["--data", self.inputs / "data.jsonl", "--stage", "train", "--set", *SETTINGS]
        command += ["--compilation-cache-dir", self.inputs / "compiled"]
        return start(command, log), log

    def finish(self, work: Path) -> str:
        process, log = self.start(work)
        assert process.wait(300) == 0, log.read_text()
        return log.read_text()

    def start_until(self, work: Path, reached: Callable[[], bool]) -> subprocess.Popen[bytes]:
        """A process that is at work when ``reached`` holds."""
        process, log = self.start(work)
        while not reached():
            assert process.poll() is None, log.read_text()
            time.sleep(0.002)
        return process


@dataclasses.dataclass(frozen=True)
class Run:
    work: Path

    @property
    def steps(self) -> list[int]:
        """Of the checkpoints that are whole, ascending."""
        names = (path.name for path in (self.work / "checkpoints").glob("*"))
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def draft(self) -> bytes:
        return (self.work / "draft" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    inputs = tmp_path_factory.mktemp("inputs")
    write_model(inputs)
    write_data(inputs / "data.jsonl")
    return Setup(inputs)


@pytest.fixture(scope="module")
def whole(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing interrupts."""
    work = tmp_path_factory.mktemp("whole") / "work"
    setup.finish(work)
    assert [step for step, _ in losses(work)] == list(range(1, STEPS + 1))
    return Run(work)


@pytest.fixture(scope="module")
def killed(setup: Setup, whole: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What kill -9 leaves, at a random step with two checkpoints behind it."""
    run = Run(tmp_path_factory.mktemp("killed") / "work")
    aim = random.randrange(2 * CHECKPOINT_EVERY + 1, STEPS - 2 * CHECKPOINT_EVERY)
    process = setup.start_until(
        run.work, lambda: len(losses(run.work)) >= aim and len(run.steps) >= 2
    )
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    print(f"killed after step {len(losses(run.work))}, checkpoints {run.steps}")
    assert not (run.work / "draft").exists()
    return run


def copy(run: Run, folder: Path) -> Run:
    return Run(Path(shutil.copytree(run.work, folder / "work")))


def test_a_killed_run_ends_as_if_nothing_had_happened(setup, whole, killed, tmp_path) -> None:
    run = copy(killed, tmp_path)
    seen = losses(run.work)
    setup.finish(run.work)
    assert losses(run.work) == losses(whole.work) and seen == losses(whole.work)[: len(seen)]
    assert run.draft == whole.draft


def test_a_truncated_checkpoint_is_named_and_the_one_before_it_used(
    setup, whole, killed, tmp_path
) -> None:
    run = copy(killed, tmp_path)
    before, newest = run.steps[-2:]
    folder = run.work / "checkpoints" / str(newest)
    files = (path for path in folder.rglob("*") if path.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    said = setup.finish(run.work)
    assert f"checkpoint {newest} is damaged" in said
    assert f"using the previous one, {before}" in said
    assert losses(run.work) == losses(whole.work) and run.draft == whole.draft


def test_sigterm_leaves_a_checkpoint_and_says_how_to_go_on(setup, whole, tmp_path) -> None:
    run = Run(tmp_path / "work")
    process = setup.start_until(run.work, lambda: len(losses(run.work)) >= CHECKPOINT_EVERY + 3)
    process.terminate()
    assert process.wait(120) == 128 + signal.SIGTERM
    step = losses(run.work)[-1][0]
    assert step < STEPS and run.steps[-1] == step and not (run.work / "draft").exists()
    said = (run.work / "log.txt").read_text()
    assert f"stopped after step {step}; the same command goes on from there" in said
    setup.finish(run.work)
    assert losses(run.work) == losses(whole.work) and run.draft == whole.draft
