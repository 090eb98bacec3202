"""What a data report says of pictures, masks and volumes: sizes, and how much of them each class has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from finetune.reports.figures import COLORS, NAME, legend_below, new_figure
from finetune.task import Described, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = 0.01  # share of a class that a mean over pixels hardly sees
MOST_CLASSES, MOST_NAMED = 30, 5
Areas = Mapping[str, tuple[Sequence[str], np.ndarray]]  # by split: names, and (rows, classes) pixels or voxels


class Finding(NamedTuple):
    """What was found, and what to do about it."""

    found: str
    advice: str


def size_table(splits: Mapping[str, Described]) -> Section:
    """How large rows are, in each direction."""
    cells = [
        [name, what, *(f"{value:,.4g}" for value in np.percentile(values, [0, 50, 100])), f"{len(np.unique(values)):,}"]
        for name, rows in splits.items()
        for what, values in rows.sizes.items()
        if len(values)
    ]
    return Section("Sizes", "", ["split", "of", "smallest", "median", "largest", "different"], cells)


def findings(areas: Areas) -> list[Finding]:
    """Classes that are rare or missing, and rows with one class alone."""
    found = []
    for split, (names, counts) in areas.items():
        alone = int(((counts > 0).sum(axis=1) <= 1).sum())
        if alone:
            what = f"{alone} of {len(counts)} {split} masks have one class alone, or none that counts"
            found.append(Finding(what, "Keep as many of them as there will be in use: they teach no border between classes."))
        missing = [name for name, total in zip(names, counts.sum(axis=0), strict=True) if not total]
        if missing and split in ("train", "validation"):
            needs = "Add masks with them, or drop the classes: they cannot be learnt." if split == "train" else (
                "Move masks with them to the validation rows: their metrics are undefined."
            )  # fmt: skip
            found.append(Finding(f"no {split} mask has the class {_listed(missing)}", needs))
    if "train" in areas:
        names, counts = areas["train"]
        small = [f"{name} ({share:.2%})" for name, share in zip(names, _shares(counts), strict=True) if 0 < share < SMALL]
        if small:
            advice = (
                "Weigh them more (--class_weights, --dice_weight) and judge by their own scores, not by a mean over pixels."
            )
            found.append(
                Finding(f"{len(small)} classes have less than {SMALL:.0%} of the training area: {_listed(small)}", advice)
            )
    return found


def class_table(areas: Areas) -> Section:
    """Of each class, its share of the area and how many rows have it."""
    (names, _), *_ = areas.values()
    columns = [column for _, counts in areas.values() for column in _columns(counts)]
    header = ["class", *(f"{split}: {what}" for split in areas for what in ("area", "rows"))]
    cells = [[name, *(column[number] for column in columns)] for number, name in enumerate(names)]
    return Section("Classes", "Shares of the pixels or voxels that count, and rows that have the class.", header, cells)


def class_figure(areas: Areas) -> Figure:
    """The classes' shares of the area, by split; the largest classes of the first split."""
    (names, first), *_ = areas.values()
    chosen = np.argsort(-first.sum(axis=0), kind="stable")[:MOST_CLASSES]
    figure, axes = new_figure("Share of the area by class", "share", height=1.4 + 0.3 * len(chosen))
    height = 0.8 / len(areas)
    for place, (color, (split, (_, counts))) in enumerate(zip(COLORS, areas.items(), strict=False)):
        shares = _shares(counts)[chosen]
        bars = axes.barh(np.arange(len(chosen)) + place * height, shares, height, color=color, label=split)
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


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:MOST_NAMED])}{', ...' if len(names) > MOST_NAMED else ''}"
