"""What a run reached, as one page that needs nothing beside itself, and as JSON."""

import dataclasses
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from train import charts

STEP = ("step", "loss", "accept_length", "accuracy")
HELD_OUT = ("loss", "accept_length", "accuracy")
RESULT = (
    "label", "source", "block_size", "temperature", "draft_sampling", "questions", "tau",
    "raw_tau", "looping", "tokens", "seconds", "tokens_per_second",
)  # fmt: skip
ABOUT = RESULT[:5]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption, .note { color: #6b7280; }
.note { border-left: 3px solid #f59e0b; padding-left: .75rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px;
        margin: .75rem 0; }
th, td { padding: .2rem .6rem; text-align: right; vertical-align: bottom;
         border-bottom: 1px solid #e5e7eb; }
th { font-weight: 600; background: #f9fafb; } td.text { text-align: left; white-space: nowrap; }
summary { cursor: pointer; color: #2563eb; }
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """``steps`` and ``held_out``: lines of train.jsonl, by step. ``evaluation``: evaluation.json,
    None without one. ``notes``: what is missing or could not be read."""

    name: str
    steps: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    evaluation: dict[str, Any] | None
    notes: list[str]

    @property
    def results(self) -> list[dict[str, Any]]:
        return self.evaluation["results"] if self.evaluation else []


def write_report(work: Path) -> Path:
    """WORK/report.html, which is returned, and WORK/report.json, from WORK/train.jsonl and
    WORK/evaluation.json; what is missing is said on the page. Raises ValueError without WORK."""
    run = read_run(work)
    data = {**dataclasses.asdict(run), "reached": reached(run)}
    (work / "report.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    page = work / "report.html"
    page.write_text(render(run), encoding="utf-8")
    return page


def read_run(work: Path) -> Run:
    """Raises ValueError where ``work`` is no folder."""
    if not work.is_dir():
        raise ValueError(f"{work} is no folder")
    notes: list[str] = []
    steps, held_out = _read_log(work / "train.jsonl", notes)
    evaluation = _read_evaluation(work / "evaluation.json", notes)
    return Run(work.resolve().name, steps, held_out, evaluation, notes)


def reached(run: Run) -> dict[str, Any]:
    """The figures that a run is judged by; None for what is not known. Held-out ones are the
    draft's own: of the best step, as checkpoints are chosen."""
    last = run.steps[-1] if run.steps else {}
    best = max(run.held_out, key=lambda r: (r["accept_length"] or 0.0, r["step"]), default={})
    return {
        "steps": last.get("step"),
        "seconds": last.get("seconds"),
        "loss": last.get("loss"),
        "teacher_forced_tau": last.get("accept_length"),
        "held_out_step": best.get("step"),
        "held_out_loss": best.get("loss"),
        "held_out_teacher_forced_tau": best.get("accept_length"),
        "tau": [
            {key: r[key] for key in (*ABOUT, "tau", "raw_tau", "looping")} for r in run.results
        ],
    }


def _read_log(path: Path, notes: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if not path.is_file():
        notes.append(f"There is no training log yet ({path.name}).")
        return [], []
    # By step: a run that was taken up at a checkpoint writes some of its steps again.
    steps: dict[int, dict[str, Any]] = {}
    held_out: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            record = json.loads(line)
            if "held_out" in record:
                values = {"step": record.get("step", max(steps, default=0)), **record["held_out"]}
                held_out[values["step"]] = _with(values, HELD_OUT)
            if "loss" in record or "held_out" not in record:
                steps[record["step"]] = _with(record, STEP)
        except (ValueError, KeyError, TypeError) as error:
            notes.append(f"{path.name}:{number} is left out: {error!r}.")
    if not steps:
        notes.append(f"The training log ({path.name}) has no steps yet.")
    return [steps[i] for i in sorted(steps)], [held_out[i] for i in sorted(held_out)]


def _read_evaluation(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        notes.append(f"The draft has not been evaluated yet ({path.name}).")
        return None
    try:
        evaluation = json.loads(path.read_bytes())
        for result in evaluation["results"]:
            _with(result, (*RESULT, "histogram", "acceptance", "reached_acceptance"))
        return {"settings": dict(evaluation["settings"]), "results": evaluation["results"]}
    except (ValueError, KeyError, TypeError) as error:
        notes.append(f"{path.name} cannot be read: {error!r}.")
        return None


def _with(record: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Raises KeyError naming a key that ``record`` lacks."""
    for key in keys:
        record[key]
    return record


def render(run: Run) -> str:
    """The page."""
    sections = [f"<h1>{html.escape(run.name)}</h1>", *map(_note, run.notes)]
    figures = {k.replace("_", " "): v for k, v in reached(run).items() if k != "tau"}
    known = [[name, value] for name, value in figures.items() if value is not None]
    if known:
        sections.append(_table(["reached", "value"], known))
    if run.steps:
        sections += _training(run)
    if run.evaluation is not None:
        sections += _evaluation(run.evaluation)
    body = "\n".join(sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(run.name)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _training(run: Run) -> list[str]:
    curves = {f"training, step {run.steps[-1]['step']}": run.steps[-1]["accuracy"]}
    if run.held_out:
        curves[f"held out, step {run.held_out[-1]['step']}"] = run.held_out[-1]["accuracy"]
    positions = range(1, max(map(len, curves.values())) + 1)
    by_position = [
        [k, *(values[k - 1] if k <= len(values) else None for values in curves.values())]
        for k in positions
    ]
    parts = [
        "<h2>Training</h2>",
        _figure(
            charts.training(run.steps, run.held_out),
            "Loss and teacher-forced tau (1 + matches in a row from the block's start).",
        ),
        _figure(charts.accuracy(curves), "Accuracy by in-block position, in teacher forcing."),
        _table(["position", *curves], by_position),
        _log_table("Every logged step", run.steps),
    ]
    if run.held_out:
        parts.append(_log_table("Every held-out measurement", run.held_out))
    return parts


def _log_table(title: str, records: Sequence[Mapping[str, Any]]) -> str:
    width = max(len(r["accuracy"]) for r in records)
    scalars = dict.fromkeys(k for r in records for k, v in r.items() if isinstance(v, int | float))
    keys = ["step", *(k for k in scalars if k not in ("step", "time"))]
    rows = [[*(r.get(k) for k in keys), *r["accuracy"]] for r in records]
    return _details(title, _table([*keys, *(f"accuracy {k + 1}" for k in range(width))], rows))


def _evaluation(evaluation: Mapping[str, Any]) -> list[str]:
    results = evaluation["results"]
    drafted = [r for r in results if r["block_size"] > 1]
    trained = [r for r in drafted if r["label"] == "trained"]
    parts = ["<h2>Real decoding</h2>"]
    if drafted:
        caption = (
            "Tau: tokens per cycle, looping answers counted up to their loop. Diamonds count the "
            "loops too; black lines are an untrained draft."
        )
        parts.append(_figure(charts.tau(drafted), caption))
    parts.append(_table(RESULT, [[r[key] for key in RESULT] for r in results]))
    if trained:
        parts += [
            _figure(charts.histogram(trained), "Tokens per cycle, all sources together."),
            _figure(
                charts.acceptance(trained),
                "Accepted drafts by in-block position: share of all cycles (solid) and of those "
                "that accepted everything before it (dashed).",
            ),
        ]
    widest = max((r["block_size"] for r in results), default=0)
    about = [[r[key] for key in ABOUT] for r in results]
    histograms = [charts.total_histogram([r]) for r in results]
    counts = [[h[n] for n in range(1, widest + 1)] for h in histograms]
    tables = {
        "Cycles by tokens committed": (range(1, widest + 1), counts),
        "Acceptance by position, of all cycles": (
            range(1, widest), [r["acceptance"] for r in results],
        ),
        "Acceptance by position, of the cycles that reached it": (
            range(1, widest), [r["reached_acceptance"] for r in results],
        ),
    }  # fmt: skip
    for title, (columns, rows) in tables.items():
        joined = [[*a, *row] for a, row in zip(about, rows, strict=True)]
        parts.append(_details(title, _table([*ABOUT, *map(str, columns)], joined)))
    settings = [
        [key, value if isinstance(value, str | int | float) else json.dumps(value)]
        for key, value in evaluation["settings"].items()
    ]
    return [*parts, "<h2>Settings</h2>", _table(["setting", "value"], settings)]


def _note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>\n{svg}\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>"


def _details(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>\n{content}</details>"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Short rows are filled up with empty cells."""
    lines = ["".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in header)]
    for row in rows:
        padded = [*row, *[None] * (len(header) - len(row))]
        lines.append("".join(map(_cell, padded)))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>\n{body}\n</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return f'<td class="text">{html.escape(value)}</td>'
    if value is None:
        return "<td></td>"
    return f"<td>{value:,}</td>" if isinstance(value, int) else f"<td>{value:.4g}</td>"
