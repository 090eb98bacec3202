"""Figures and tables for segmentation of images and volumes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from samerun.metrics.segmentation import PREDICTED, SHARED, TRUE, dice, iou
from samerun.reports.figures import BLUE, GREY, NAME, legend_below, matrix, new_figure
from samerun.task import Predictions, ReportContent, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS, MOST_BARS, MOST_CONFUSED = 20, 30, 15


def show(
    predictions: Predictions, classes: Sequence[str], ids: Sequence[str], first: int = 0
) -> ReportContent:
    """Dice by class, the confusion matrix, and the worst rows.

    `predictions`: `loss` (rows,), `counts` (rows, classes, 3) and, for few classes, `confusion` (rows, true
    classes, predicted classes). `first`: the first class to be scored; 1 leaves out the background.
    """
    counts = predictions["counts"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nanmean of rows without any class
        by_row = {
            name: np.nanmean(metric(counts)[:, first:], axis=1)
            for name, metric in (("iou", iou), ("dice", dice))
        }
    # A row without any class, in truth and prediction, is right.
    scores = {
        "loss": predictions["loss"],
        **{name: np.nan_to_num(values, nan=1.0) for name, values in by_row.items()},
    }
    total = counts.sum(axis=0)
    figures = {"class_dice": _dice(total[first:], classes[first:])}
    if "confusion" in predictions:
        figures["class_confusion"] = _confusion(predictions["confusion"].sum(axis=0), classes)
    by_class = iou(counts)[:, first:]
    rows = []
    for row in np.argsort(-scores["loss"], kind="stable")[:MOST_ROWS].tolist():
        known = np.flatnonzero(~np.isnan(by_class[row]))
        worst = known[by_class[row, known].argmin()] if len(known) else None
        worst_class = "-" if worst is None else f"{classes[first + worst]} ({by_class[row, worst]:.2f})"
        rows.append([str(ids[row]), *(f"{scores[name][row]:.4f}" for name in scores), worst_class])
    header = ["row", *scores, "worst class (IoU)"]
    return ReportContent(figures, [Section("Worst validation rows", "By loss, worst first.", header, rows)])


def _dice(total: np.ndarray, classes: Sequence[str]) -> Figure:
    """Dice, precision and recall of each class over all rows; `total`: (classes, 3)."""
    chosen = np.argsort(-total[:, TRUE], kind="stable")[:MOST_BARS]
    positions, total = np.arange(len(chosen)), total[chosen]
    figure, axes = new_figure("Dice by class, over all validation rows", "", height=1.5 + 0.3 * len(chosen))
    axes.barh(positions, np.nan_to_num(dice(total)), color=BLUE, label="Dice")
    for marker, label, denominator in (("<", "precision", PREDICTED), (">", "recall", TRUE)):
        share = total[:, SHARED] / np.maximum(total[:, denominator], 1)
        axes.plot(share, positions, marker, color="black", markerfacecolor=GREY, markersize=5, label=label)
    axes.set_yticks(positions, [classes[number][:NAME] for number in chosen])
    axes.set_xlim(0, 1.02)
    axes.invert_yaxis()
    legend_below(figure)
    return figure


def _confusion(confusion: np.ndarray, classes: Sequence[str]) -> Figure:
    """The confusion matrix in percent of each true class, for the classes with the most errors."""
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    errors = confusion.sum(axis=0) + confusion.sum(axis=1) - 2 * confusion.diagonal()
    chosen = np.sort(np.argsort(-errors, kind="stable")[:MOST_CONFUSED])
    shares = shares[np.ix_(chosen, chosen)]
    title, names = "Predicted class by true class, % of its area", [classes[number] for number in chosen]
    return matrix(title, (shares * 100).round().astype(int), names, x="predicted", y="true", shares=shares)
