"""The parts of the data report about images, masks and volumes: sizes, and areas of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from samerun.reports.figures import COLORS, NAME, legend_below, new_figure
from samerun.task import DataInfo, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL_SHARE = 0.01  # of the area: a smaller class hardly influences means over pixels
MOST_CLASSES, MOST_NAMES = 30, 5
Areas = Mapping[
    str, tuple[Sequence[str], np.ndarray]
]  # split -> (class names, (rows, classes) pixels or voxels)


class Finding(NamedTuple):
    """A problem of the data, and advice."""

    found: str
    advice: str


def size_table(splits: Mapping[str, DataInfo]) -> Section:
    """Quantiles of the sizes of rows, by dimension."""
    cells = [
        [
            name,
            dimension,
            *(f"{value:,.4g}" for value in np.percentile(values, [0, 50, 100])),
            f"{len(np.unique(values)):,}",
        ]
        for name, rows in splits.items()
        for dimension, values in rows.sizes.items()
        if len(values)
    ]
    return Section("Sizes", "", ["split", "of", "smallest", "median", "largest", "different"], cells)


def findings(areas: Areas) -> list[Finding]:
    """Findings about rare and missing classes, and about rows with a single class."""
    findings = []
    for split, (names, counts) in areas.items():
        single = int(((counts > 0).sum(axis=1) <= 1).sum())
        if single:
            found = f"{single} of {len(counts)} {split} masks have one class only, or are ignored altogether"
            advice = (
                "Keep no larger share of them than expected in use: they teach no border between classes."
            )
            findings.append(Finding(found, advice))
        missing = [name for name, total in zip(names, counts.sum(axis=0), strict=True) if not total]
        if missing and split in ("train", "validation"):
            advice = "Move masks with them to the validation rows: their metrics are undefined."
            if split == "train":
                advice = "Add masks with them, or drop the classes: they cannot be learnt."
            findings.append(Finding(f"no {split} mask has the class {shortened(missing)}", advice))
    if "train" in areas:
        names, counts = areas["train"]
        shares = zip(names, _shares(counts), strict=True)
        small = [f"{name} ({share:.2%})" for name, share in shares if 0 < share < SMALL_SHARE]
        if small:
            found = (
                f"{len(small)} classes have less than {SMALL_SHARE:.0%} of the training area: "
                f"{shortened(small)}"
            )
            advice = (
                "Increase their weight (--class_weights, --dice_weight); compare their own scores, not "
                "a mean over pixels."
            )
            findings.append(Finding(found, advice))
    return findings


def class_table(areas: Areas) -> Section:
    """For each class, its share of the area and the number of rows with it."""
    (names, _), *_ = areas.values()
    columns = [column for _, counts in areas.values() for column in _columns(counts)]
    header = ["class", *(f"{split}: {column}" for split in areas for column in ("area", "rows"))]
    cells = [[name, *(column[number] for column in columns)] for number, name in enumerate(names)]
    return Section(
        "Classes",
        "Shares of the pixels or voxels, without ignored ones; rows that have the class.",
        header,
        cells,
    )


def class_figure(areas: Areas) -> Figure:
    """The share of the area by class and split, for the largest classes of the first split."""
    (names, first), *_ = areas.values()
    chosen = np.argsort(-first.sum(axis=0), kind="stable")[:MOST_CLASSES]
    figure, axes = new_figure("Share of the area by class", "share", height=1.4 + 0.3 * len(chosen))
    height = 0.8 / len(areas)
    for number, (color, (split, (_, counts))) in enumerate(zip(COLORS, areas.items(), strict=False)):
        shares = _shares(counts)[chosen]
        bars = axes.barh(np.arange(len(chosen)) + number * height, shares, height, color=color, label=split)
        axes.bar_label(bars, [f"{share:.2%}" for share in shares], fontsize=6, padding=2)
    axes.set_yticks(np.arange(len(chosen)) + 0.4 - height / 2, [names[number][:NAME] for number in chosen])
    axes.set_xlim(0, 1.15)
    axes.invert_yaxis()
    legend_below(figure)
    return figure


def _shares(counts: np.ndarray) -> np.ndarray:
    totals = counts.sum(axis=0)
    return totals / max(1, totals.sum())


def _columns(counts: np.ndarray) -> tuple[list[str], list[str]]:
    return [f"{share:.2%}" for share in _shares(counts)], [f"{rows:,}" for rows in (counts > 0).sum(axis=0)]


def shortened(names: list[str]) -> str:
    return f"{', '.join(names[:MOST_NAMES])}{', ...' if len(names) > MOST_NAMES else ''}"
