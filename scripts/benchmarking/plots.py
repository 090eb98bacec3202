"""Draws the plot of a table."""

from pathlib import Path
from typing import Any

OURS, OTHERS = "#1f6fb4", ("#8a8f98", "#c97b2f", "#5a9367", "#9467a9", "#b5555b", "#4d8f9e")


def draw(title: str, chart: dict[str, Any], path: Path) -> None:
    """Draws a chart of `report.table` into `path`."""
    import pandas  # slow to import
    from matplotlib.figure import Figure

    frame = pandas.DataFrame({name: dict(points) for name, points in chart["series"].items()})
    single, bars = len(frame.columns) == 1, isinstance(frame.index[0], str)
    axes = Figure(
        figsize=(7.0, max(2.0, 0.32 * frame.size + 1.1) if bars else 3.6), layout="constrained"
    ).add_subplot()
    if bars:
        values = frame.iloc[:, 0] if single else frame
        values.plot.barh(
            ax=axes, width=0.8, fontsize=9, color=colours(list(frame.index if single else frame))
        )
        for container in axes.containers:
            axes.bar_label(container, fmt="%.3g", fontsize=8, padding=2)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(chart["y"], fontsize=9)
    else:
        frame.plot(
            ax=axes,
            marker="o",
            markersize=4,
            color=colours(list(frame)),
            xticks=frame.index,
            fontsize=8,
            legend=False,
        )
        axes.set_xlabel(chart["x"], fontsize=9)
        axes.set_ylabel(chart["y"], fontsize=9)
        axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if not single:
        axes.legend(frameon=False, fontsize=8)
    axes.figure.savefig(path, dpi=110, metadata={"Software": None})


def colours(names: list[str]) -> list[str]:
    """A colour for each name; always the same one for "ours"."""
    others = [name for name in names if name != "ours"]
    return [OTHERS[others.index(name) % len(OTHERS)] if name in others else OURS for name in names]
