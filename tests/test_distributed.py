"""Two processes that train one draft together, through the program's own flags."""

import dataclasses
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_model import write_model
from training_process import SMALL, start, write_data

from train.metrics import read_records

STEPS, CHECKPOINT_EVERY = 60, 20
SETTINGS = (
    *SMALL, "initial=target", "intermediate_size=128", "held_out_share=0.2", f"loop.steps={STEPS}",
    f"loop.checkpoint_every={CHECKPOINT_EVERY}",
)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder)
    write_data(folder / "data.jsonl")
    return folder


@dataclasses.dataclass(frozen=True)
class Processes:
    """Of one run, with one device each."""

    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    @classmethod
    def start(cls, inputs: Path, work: Path, count: int, data: Path | None = None) -> "Processes":
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        command = ["train", "smollm2", "--work", work, "--target", inputs / "target"]
        command += ["--data", data or inputs / "data.jsonl", "--stage", "train"]
        command += ["--compilation-cache-dir", inputs / "compiled", "--set", *SETTINGS]
        if count > 1:
            command += ["--fsdp-size", count, "--distributed", "--num-processes", count]
            command += ["--coordinator", f"localhost:{port}"]
        logs = [work.with_suffix(f".{number}.txt") for number in range(count)]
        own = [("--process-id", number) if count > 1 else () for number in range(count)]
        return cls([start([*command, *o], log) for o, log in zip(own, logs, strict=True)], logs)

    def wait(self) -> list[int]:
        """Their exit statuses. None outlives this."""
        try:
            return [process.wait(300) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def said(self) -> list[str]:
        return [log.read_text() for log in self.logs]


def curve(work: Path) -> tuple[list[int], list[float]]:
    """Step, and loss or held-out loss, of every line of train.jsonl."""
    records = read_records(work / "train.jsonl")
    values = [record.get("held_out", record)["loss"] for record in records]
    return [record["step"] for record in records], values


def test_two_processes_learn_what_one_does(inputs: Path, tmp_path: Path) -> None:
    """To tolerance, for sums over devices have another order; and also where SIGTERM, sent to one
    of them, has stopped both after the same step and the same commands have gone on."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    run = Processes.start(inputs, alone, 1)
    assert run.wait() == [0], run.said()

    run = Processes.start(inputs, together, 2)
    while not (together / "train.jsonl").exists() or len(curve(together)[0]) < 2:
        assert all(process.poll() is None for process in run.processes), run.said()
        time.sleep(0.01)
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.wait() == [128 + signal.SIGTERM] * 2, run.said()
    stopped = curve(together)[0][-1]
    assert stopped < STEPS and (together / "checkpoints" / str(stopped)).is_dir()
    assert f"stopped after step {stopped}; the same command goes on" in run.said()[0]
    run = Processes.start(inputs, together, 2)
    assert run.wait() == [0, 0], run.said()
    first, second = run.said()
    assert f"exported step {STEPS} to" in first and "step" not in second  # one of them speaks

    (steps, one), (steps_together, two) = curve(alone), curve(together)
    assert steps == steps_together and len(steps) == STEPS + STEPS // CHECKPOINT_EVERY
    np.testing.assert_allclose(two[:6], one[:6], rtol=1e-5)
    np.testing.assert_allclose(two, one, rtol=1e-3)
    draft, draft_together = (
        load_file(work / "draft" / "model.safetensors") for work in (alone, together)
    )
    assert draft.keys() == draft_together.keys()
    for name, value in draft.items():
        np.testing.assert_allclose(draft_together[name], value, atol=1e-2, err_msg=name)


def test_what_one_process_finds_wrong_ends_both(inputs: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n")
    run = Processes.start(inputs, tmp_path / "work", 2, bad)
    assert run.wait() == [2, 2], run.said()
    first, second = run.said()
    assert f"{bad}:1: JSONDecodeError" in first and "process 0 could not pack" in second
