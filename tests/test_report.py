"""The report as a reader gets it: whole, readable without a network, and honest about gaps."""

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from train.report import reached, read_run, write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags close in order, and gathers what the tests look at."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids[value or ""] += 1
            elif name in ("href", "xlink:href", "src"):
                self.links.append(value or "")
            else:
                self.links += re.findall(r"url\(([^)]+)\)", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def step(number: int, loss: float, **more: Any) -> dict[str, Any]:
    return {
        "loss": loss,
        "accept_length": 4 - loss,
        "accuracy": [0.5, 0.25, 0.125],
        "step": number,
        "learning_rate": 1e-3,
        "seconds": 2.5 * number,
        "tokens_per_second": 123456.0,
    } | more


def result(label: str, source: str, block_size: int, temperature: float, tau: float, **more):
    drafts = block_size - 1
    return {
        "label": label,
        "source": source,
        "block_size": block_size,
        "temperature": temperature,
        "draft_sampling": "coupled",
        "questions": 7,
        "tau": tau,
        "raw_tau": tau + 0.125,
        "looping": 0.25,
        "acceptance": [0.5] * drafts,
        "reached_acceptance": [*[0.75] * (drafts - 1), None][:drafts],
        "histogram": {"1": 10, str(block_size): 4321},
        "tokens": 999,
        "seconds": 3.0,
        "tokens_per_second": 333.0,
        **more,
    }


STEPS = [
    step(10, 3.0, time=1.7e9),
    step(20, 2.0, learning_rate=None, accept_length=None, accuracy=[0.5, None, 0.125]),
    step(30, 1.75, notes={"tau": 1}),
]
HELD_OUT = {"loss": 2.125, "accept_length": 1.875, "accuracy": [0.5, 0.375, 0.0625]}
LATER = {"loss": 2.25, "accept_length": 1.75, "accuracy": [0.5, 0.375, 0.0625]}
RESULTS = [
    result(label, source, b, t, tau + b / 8)
    for label, tau in (("trained", 3.0), ("untrained", 1.0))
    for b in (4, 8)
    for t in (0.0, 1.0)
    for source in ("GSM8K", "<MT & Bench>")
] + [result("trained", "GSM8K", 1, 0.0, 1.0)]
SETTINGS = {"target": "t", "draft": "d", "devices": ["cpu: cpu"], "versions": {"jax": "0.10"}}


def write(work: Path, log: Sequence[object] = (), results: Sequence[object] | None = None) -> Path:
    work.mkdir(exist_ok=True)
    if log:
        lines = (line if isinstance(line, str) else json.dumps(line) for line in log)
        (work / "train.jsonl").write_text("\n".join(lines) + "\n")
    if results is not None:
        evaluation = {"settings": SETTINGS, "results": results}
        (work / "evaluation.json").write_text(json.dumps(evaluation))
    return work


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    log = [
        *STEPS[:2],
        {"step": 20, "held_out": HELD_OUT},
        STEPS[2],
        {"step": 30, "held_out": LATER},
    ]
    return write_report(write(tmp_path_factory.mktemp("run"), log, RESULTS))


def test_the_page_needs_nothing_beside_itself(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert parsed.tags["svg"] == 5 and parsed.tags["script"] == 0 and parsed.tags["link"] == 0
    assert all(link.startswith("#") for link in parsed.links), "something is loaded"
    assert {link[1:] for link in parsed.links} <= parsed.ids.keys()
    assert set(parsed.ids.values()) == {1}, "the charts' ids must not meet"
    assert "@import" not in text and "<!DOCTYPE svg" not in text
    assert 'class="note"' not in text, "nothing is missing"


def test_the_page_has_every_number(page: Path) -> None:
    cells = Counter(Page(page.read_text(encoding="utf-8")).cells)
    for record in STEPS:
        assert cells[f"{record['loss']:.4g}"] and cells[f"{record['seconds']:.4g}"]
    assert cells["0.125"] >= 3 and cells["0.0625"] and cells["2.125"]
    for record in RESULTS:
        assert cells[f"{record['tau']:.4g}"] and cells[f"{record['raw_tau']:.4g}"]
    assert cells["<MT & Bench>"] and cells["4,321"] == len(RESULTS)
    assert cells["t"] and cells['{"jax": "0.10"}']


def test_the_figures_as_json(page: Path) -> None:
    data = json.loads((page.parent / "report.json").read_text())
    assert data["steps"] == STEPS
    assert data["held_out"] == [{"step": 20, **HELD_OUT}, {"step": 30, **LATER}]
    assert data["evaluation"]["results"] == RESULTS and data["notes"] == []
    assert data["reached"] == reached(read_run(page.parent))
    assert data["reached"]["loss"] == 1.75 and data["reached"]["teacher_forced_tau"] == 2.25
    assert data["reached"]["held_out_teacher_forced_tau"] == 1.875  # the draft's, not the last
    assert data["reached"]["held_out_step"] == 20
    assert data["reached"]["tau"][0]["tau"] == 3.5


def test_the_same_numbers_make_the_same_page(page: Path) -> None:
    before = page.read_bytes()
    assert write_report(page.parent).read_bytes() == before


@pytest.mark.parametrize(
    ("log", "results", "charts", "notes"),
    [
        ([], None, 0, ["no training log yet", "has not been evaluated yet"]),
        (STEPS, None, 2, ["has not been evaluated yet (evaluation.json)"]),
        (STEPS[:1], [], 2, []),
        ([{"step": 0, "held_out": HELD_OUT}], None, 0, ["has no steps yet", "not been evaluated"]),
        ([], RESULTS[:1], 3, ["no training log yet (train.jsonl)"]),
        ([], RESULTS[-1:], 0, ["no training log yet"]),
        ([], [{"tau": 3}], 0, ["no training log", "evaluation.json cannot be read: KeyError"]),
        (
            [STEPS[0], '{"step": 2', 3, {"step": 4}, STEPS[1]], [], 2,
            ["train.jsonl:2 is left out", "train.jsonl:3 is left", "train.jsonl:4 is left"],
        ),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(tmp_path: Path, log, results, charts: int, notes) -> None:
    work = write(tmp_path / "work", log, results)
    parsed = Page(write_report(work).read_text(encoding="utf-8"))
    assert parsed.tags["svg"] == charts
    said = read_run(work).notes
    assert len(said) == len(notes)
    assert all(note in line for note, line in zip(notes, said, strict=True))


def test_steps_that_a_resumed_run_writes_again_count_once(tmp_path: Path) -> None:
    again = step(20, 1.5)
    run = read_run(write(tmp_path / "work", [*STEPS[:2], STEPS[2], again, STEPS[2]]))
    assert run.steps == [STEPS[0], again, STEPS[2]]


def test_the_command(page: Path, tmp_path: Path, run_command) -> None:
    assert run_command("report", ["--work", str(page.parent)]) == (0, f"wrote {page}\n", "")
    absent = tmp_path / "absent"
    message = f"python -m train report: error: {absent} is no folder\n"
    assert run_command("report", ["--work", str(absent)]) == (2, "", message)
    assert "required: --work" in run_command("report", [])[2]


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")
def test_a_browser_shows_it(page: Path) -> None:
    assert BROWSER is not None
    shown = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip
    assert shown.count("<svg") == 5 and "Real decoding" in shown
