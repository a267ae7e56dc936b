"""Two processes that train one draft together, through the program's own flags."""

import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_model import write_model
from training_process import SMALL, start, write_data

from train.metrics import read_records

SETTINGS = (
    *SMALL, "initial=target", "intermediate_size=128", "held_out_share=0.2", "loop.steps=4",
    "loop.checkpoint_every=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder)
    write_data(folder / "data.jsonl")
    return folder


def run_together(inputs: Path, work: Path, data: Path, count: int) -> list[tuple[int, str]]:
    """(exit status, what was printed) of ``count`` processes with one device each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = ["train", "smollm2", "--work", work, "--target", inputs / "target"]
    command += ["--data", data, "--stage", "train", "--set", *SETTINGS]
    command += ["--compilation-cache-dir", inputs / "compiled"]
    if count > 1:
        command += ["--fsdp-size", count, "--distributed", "--num-processes", count]
        command += ["--coordinator", f"localhost:{port}"]
    logs = [work.with_suffix(f".{number}.txt") for number in range(count)]
    processes = [
        start([*command, *(("--process-id", number) if count > 1 else ())], log)
        for number, log in enumerate(logs)
    ]
    try:
        statuses = [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return list(zip(statuses, [log.read_text() for log in logs], strict=True))


def curves(work: Path) -> list[tuple[int, list[float]]]:
    """(step, loss or held-out loss and acceptance) of every line of train.jsonl."""
    return [
        (record["step"], [values["loss"], values["accept_length"]])
        for record in read_records(work / "train.jsonl")
        for values in [record.get("held_out", record)]
    ]


def test_two_processes_learn_what_one_does(inputs: Path, tmp_path: Path) -> None:
    """To tolerance: sums over devices have another order."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    for work, count in ((alone, 1), (together, 2)):
        said = run_together(inputs, work, inputs / "data.jsonl", count)
        assert [status for status, _ in said] == [0] * count, said
        # One of them speaks.
        assert ["exported step" in text for _, text in said] == [True, *[False] * (count - 1)]
    steps = [step for step, _ in curves(alone)]
    assert [step for step, _ in curves(together)] == steps == [1, 2, 2, 3, 4, 4]
    for (_, one), (_, two) in zip(curves(alone), curves(together), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5)
    one, two = (load_file(work / "draft" / "model.safetensors") for work in (alone, together))
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, atol=1e-4, err_msg=name)


def test_what_one_process_finds_wrong_ends_both(inputs: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n")
    said = run_together(inputs, tmp_path / "work", bad, 2)
    assert all(status == 2 for status, _ in said), said
    assert f"{bad}:1: JSONDecodeError" in said[0][1]
