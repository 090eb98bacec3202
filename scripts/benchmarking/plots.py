"""Draws the plot of a table."""

from pathlib import Path
from typing import Any

COLOURS = ("#1f6fb4", "#8a8f98", "#c97b2f", "#5a9367", "#9467a9", "#b5555b", "#4d8f9e")  # the first: "ours"


def draw(title: str, chart: dict[str, Any], path: Path) -> None:
    """Draws a chart of `report.table` into `path`."""
    import pandas  # slow to import
    from matplotlib.figure import Figure

    frame = pandas.DataFrame({name: dict(points) for name, points in chart["series"].items()})
    axes = Figure(figsize=(7.0, 3.6), layout="constrained").add_subplot()
    frame.plot(ax=axes, marker="o", markersize=4, color=COLOURS, xticks=frame.index, fontsize=8, legend=False)
    axes.set_xlabel(chart["x"], fontsize=9)
    axes.set_ylabel(chart["y"], fontsize=9)
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    axes.figure.savefig(path, dpi=110, metadata={"Software": None})
