"""The run's log: the same in both files, and no step twice or missing after a resumption."""

import io
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.metrics import MetricsLog, Progress, read_records


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {
        tag: [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_records(folder / "train.jsonl")]


def test_one_record_in_both(tmp_path):
    values = {
        "loss": 1.5,
        "tokens": 2,
        "accuracy": [0.5, 0.25],
        "evaluation": {"tau": 3.0, "acceptance": [1.0]},
        "gradient_norm": math.inf,
    }
    with MetricsLog(tmp_path / "new", resume_step=0) as log:
        log.write(10, values)
        # While the run goes on, and were it killed now.
        [record] = read_records(tmp_path / "new" / "train.jsonl")
        assert scalars(tmp_path / "new") == {
            "loss": [(10, 1.5)],
            "tokens": [(10, 2.0)],
            "accuracy/1": [(10, 0.5)],
            "accuracy/2": [(10, 0.25)],
            "evaluation/tau": [(10, 3.0)],
            "evaluation/acceptance/1": [(10, 1.0)],
        }
    assert record.pop("time") > 1e9
    assert record == values | {"step": 10, "gradient_norm": None}


@pytest.mark.parametrize("torn", ["", '{"step": 50, "ti', "\0\0"])
def test_resumption_drops_what_was_lost(torn, tmp_path):
    with MetricsLog(tmp_path, resume_step=0) as log:
        for step in range(10, 60, 10):
            log.write(step, {"loss": float(step)})
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(torn)
    times = [record["time"] for record in read_records(tmp_path / "train.jsonl")]
    with MetricsLog(tmp_path, resume_step=30) as log:
        assert steps(tmp_path) == [10, 20, 30]
        for step in (40, 50):
            log.write(step, {"loss": -float(step)})
    assert steps(tmp_path) == [10, 20, 30, 40, 50]
    assert scalars(tmp_path) == {
        "loss": [(10, 10.0), (20, 20.0), (30, 30.0), (40, -40.0), (50, -50.0)]
    }
    again = [record["time"] for record in read_records(tmp_path / "train.jsonl")]
    assert again[:3] == times[:3]
    with MetricsLog(tmp_path, resume_step=0):
        assert steps(tmp_path) == []
    assert scalars(tmp_path) == {}


def test_cut_anywhere(tmp_path):
    with MetricsLog(tmp_path, resume_step=0) as log:
        log.write(1, {"loss": 1.0})
        log.write(2, {"loss": 2.0})
    path = tmp_path / "train.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert steps(tmp_path) == [1, 2][: (size >= first) + (size >= len(whole))]


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1}'])
def test_other_damage_is_named(line, tmp_path):
    path = tmp_path / "train.jsonl"
    good = json.dumps({"step": 1, "time": 1.0})
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=r"train\.jsonl:2: "):
        MetricsLog(tmp_path, resume_step=1)
    assert path.read_text().count("\n") == 3


def test_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in list(sys.modules):
        if name.startswith("tensorboard."):
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'dflash_jax\[train\]'"):
        MetricsLog(tmp_path, resume_step=0)


RECORD = {"loss": 3.14159, "accept_length": 2.345, "tokens_per_second": 45678.9}


def test_lines_without_a_terminal(monkeypatch):
    clock = itertools.count(0, 100)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    stream = io.StringIO()
    with Progress(1000, start=100, stream=stream) as progress:
        progress.move(101)
        progress.show(150, RECORD)
        progress.say("saved")
        progress.show(1000, {"loss": 1.0})
    assert stream.getvalue().splitlines() == [
        "step 150/1000  loss 3.142  tau 2.35  tokens/s 45,679  0:28:20 left",
        "saved",
        "step 1000/1000  loss 1.000  0:00:00 left",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal():
    stream = Terminal()
    with Progress(10, start=2, stream=stream) as progress:
        progress.move(4)
        progress.show(5, RECORD)
        progress.say("saved")
    shown = stream.getvalue()
    assert "5/10" in shown and "loss 3.142  tau 2.35  tokens/s 45,679" in shown
    assert "saved\n" in shown and "<" in shown  # the time left
