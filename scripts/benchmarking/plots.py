"""The plot of a table, if matplotlib is there (scripts/benchmarking/requirements.txt)."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarking.report import Chart, Table

OURS, OTHERS = "#1f6fb4", ("#8a8f98", "#c97b2f", "#5a9367", "#9467a9", "#b5555b", "#4d8f9e")
told = False


def draw(title: str, table: Table, path: Path) -> bool:
    """Draws `table.chart` into `path`; False, and a word to the user, where matplotlib is missing."""
    global told
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        if not told:
            print("no plots: pip install -r scripts/benchmarking/requirements.txt", file=sys.stderr)
        told = True
        return False
    chart = table.chart
    names = {x for points in chart.series.values() for x in points}
    bars = any(isinstance(name, str) for name in names)
    height = max(2.0, 0.32 * len(names) * max(1, len(chart.series)) + 1.1) if bars else 3.6
    figure = Figure(figsize=(7.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    (draw_bars if bars else draw_lines)(axes, chart)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.series) > 1:
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True


def colour(name: str, others: list[str]) -> str:
    return OURS if name.startswith("ours") or name not in others else OTHERS[others.index(name) % len(OTHERS)]


def draw_bars(axes, chart: Chart) -> None:
    """Lying bars: a group for each label, in it one for each series."""
    labels = list(dict.fromkeys(label for points in chart.series.values() for label in points))
    others = [name for name in (chart.series if len(chart.series) > 1 else labels) if not name.startswith("ours")]
    thick = 0.8 / len(chart.series)
    for number, (name, points) in enumerate(chart.series.items()):
        places = [labels.index(label) + (number - (len(chart.series) - 1) / 2) * thick for label in points]
        shown = [colour(label, others) for label in points] if len(chart.series) == 1 else colour(name, others)
        bars = axes.barh(places, list(points.values()), thick * 0.92, color=shown, label=name)
        axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(chart.unit, fontsize=9)
    axes.margins(x=0.12)


def draw_lines(axes, chart: Chart) -> None:
    others = [name for name in chart.series if not name.startswith("ours")]
    for name, points in chart.series.items():
        axes.plot(list(points), list(points.values()), marker="o", markersize=4, color=colour(name, others), label=name)
    ticks = sorted({x for points in chart.series.values() for x in points})
    if chart.logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.minorticks_off()
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    if not chart.logarithmic:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(chart.x, fontsize=9)
    axes.set_ylabel(chart.unit, fontsize=9)
    axes.grid(alpha=0.25)
