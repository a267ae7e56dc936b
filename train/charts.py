"""Charts of a run as SVG text that can stand inline in a page, many on one."""

import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Record = Mapping[str, Any]

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be read, searched and copied
    "svg.hashsalt": "dflash_jax",  # the same numbers give the same page
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "grid.color": "#e4e7eb",
    "legend.frameon": False,
}
COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04")
PANEL_WIDTH, HEIGHT = 4.6, 3.2  # inches


def training(steps: Sequence[Record], held_out: Sequence[Record]) -> str:
    """Loss and teacher-forced tau over steps."""
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(2)
        titles = {"loss": "loss", "accept_length": "teacher-forced tau"}
        for panel, (key, title) in zip(panels, titles.items(), strict=True):
            panel.plot(*_curve(steps, key), color=COLOURS[0], label="training")
            if held_out:
                panel.plot(*_curve(held_out, key), "o-", color=COLOURS[1], label="held out")
            panel.set(title=title, xlabel="step")
            _whole(panel)
            panel.legend()
        return _svg(figure, "training")


def accuracy(curves: Mapping[str, Sequence[float | None]]) -> str:
    """Accuracy by in-block position, a curve a name."""
    with matplotlib.rc_context(STYLE):
        figure, (panel,) = _panels(1)
        for (name, values), colour in zip(curves.items(), itertools.cycle(COLOURS)):
            x, y = range(1, len(values) + 1), [number(value) for value in values]
            panel.plot(x, y, "o-", color=colour, label=name)
        panel.set(title="accuracy by position", xlabel="in-block position", ylim=(0, 1.02))
        _whole(panel)
        panel.legend()
        return _svg(figure, "accuracy")


def tau(results: Sequence[Record]) -> str:
    """Bars by source and block size, a panel a temperature and way of drafting; diamonds: loops
    counted too; black lines: the untrained draft."""
    with matplotlib.rc_context(STYLE):
        groups = by(results, "temperature", "draft_sampling")
        figure, panels = _panels(len(groups))
        for panel, (key, group) in zip(panels, groups.items(), strict=True):
            _tau_bars(panel, group)
            panel.set(title=_decoding(key), ylabel="tau", ylim=(0, 1.2 * panel.get_ylim()[1]))
            panel.legend(loc="upper center", ncols=4)  # above the bars
        return _svg(figure, "tau")


def _tau_bars(panel: Axes, group: Sequence[Record]) -> None:
    sources = list(dict.fromkeys(r["source"] for r in group))
    sizes = sorted({r["block_size"] for r in group})
    width = 0.8 / len(sizes)
    for number, size in enumerate(sizes):
        colour = COLOURS[number % len(COLOURS)]
        left = (number - (len(sizes) - 1) / 2) * width
        rows = [r for r in group if r["block_size"] == size]
        trained = [r for r in rows if r["label"] == "trained"]
        at = [sources.index(r["source"]) + left for r in trained]
        panel.bar(at, [r["tau"] for r in trained], width * 0.92, color=colour, label=f"b = {size}")
        panel.plot(at, [r["raw_tau"] for r in trained], "D", ms=4, mfc="white", mec="#374151")
        untrained = [r for r in rows if r["label"] == "untrained"]
        at = [sources.index(r["source"]) + left for r in untrained]
        ends = [x - width / 2 for x in at], [x + width / 2 for x in at]
        panel.hlines([r["tau"] for r in untrained], *ends, color="black", lw=2)
    panel.set_xticks(range(len(sources)), sources, rotation=20, ha="right")
    panel.grid(axis="x", visible=False)


def histogram(results: Sequence[Record]) -> str:
    """Share of cycles by the tokens that they committed, all sources together."""
    with matplotlib.rc_context(STYLE):
        groups = by(results, "temperature", "draft_sampling")
        figure, panels = _panels(len(groups))
        for panel, (key, group) in zip(panels, groups.items(), strict=True):
            sizes = by(group, "block_size")
            for (size, rows), colour in zip(sorted(sizes.items()), itertools.cycle(COLOURS)):
                counts = total_histogram(rows)
                cycles = max(sum(counts.values()), 1)
                x = range(1, size[0] + 1)
                shares = [counts[tokens] / cycles for tokens in x]
                panel.plot(x, shares, "o-", ms=3, color=colour, label=f"b = {size[0]}")
            panel.set(title=_decoding(key), xlabel="tokens of a cycle", ylabel="share of cycles")
            _whole(panel)
            panel.legend()
        return _svg(figure, "histogram")


def acceptance(results: Sequence[Record]) -> str:
    """Share of cycles that accepted each position: of all (solid), of those that reached it
    (dashed); all sources together."""
    with matplotlib.rc_context(STYLE):
        groups = by(results, "temperature", "draft_sampling")
        figure, panels = _panels(len(groups))
        for panel, (key, group) in zip(panels, groups.items(), strict=True):
            sizes = by(group, "block_size")
            for (size, rows), colour in zip(sorted(sizes.items()), itertools.cycle(COLOURS)):
                counts = total_histogram(rows)
                above = [sum(n for c, n in counts.items() if c > k) for k in range(size[0])]
                x = range(1, size[0])
                shares = [n / max(above[0], 1) for n in above[1:]]
                panel.plot(x, shares, "o-", ms=3, color=colour, label=f"b = {size[0]}")
                reached = [n / m if m else math.nan for m, n in itertools.pairwise(above)]
                panel.plot(x, reached, "--", color=colour)
            panel.set(title=_decoding(key), xlabel="in-block position", ylim=(0, 1.02))
            _whole(panel)
            panel.legend()
        return _svg(figure, "acceptance")


def total_histogram(results: Sequence[Record]) -> Counter[int]:
    """Cycles by committed tokens; JSON's keys are texts."""
    total: Counter[int] = Counter()
    for result in results:
        total.update({int(tokens): n for tokens, n in result["histogram"].items()})
    return total


def by(results: Sequence[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    """Results by their values of ``keys``, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for result in results:
        groups.setdefault(tuple(result[key] for key in keys), []).append(result)
    return groups


def _decoding(key: tuple[Any, ...]) -> str:
    temperature, draft_sampling = key
    return f"T = {temperature:g}" + (f", {draft_sampling} drafts" if temperature else "")


def _curve(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    return [r["step"] for r in records], [number(r[key]) for r in records]


def number(value: float | None) -> float:
    """What was not finite is null in the log; a curve has a gap there."""
    return math.nan if value is None else value


def _whole(panel: Axes) -> None:
    """Steps and positions are integers."""
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Two panels a row."""
    columns = min(count, 2)
    rows = -(-count // columns)
    figure = Figure(figsize=(PANEL_WIDTH * columns, HEIGHT * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    panels = list(grid.flat)
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]


def _svg(figure: Figure, name: str) -> str:
    """The bare <svg> element, its ids made unique to the page by ``name``."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
