"""Figures for classification of pictures."""

from __future__ import annotations

from functools import partial

import numpy as np

from finetune.metrics.single_label import confusion_matrix
from finetune.reports.figures import new_figure
from finetune.task import Judgement, Shown

MOST_CLASSES = 30  # those with most errors are shown


def judge(found: np.ndarray, labels: np.ndarray, names: list[str]) -> Judgement:
    """`found` and `labels`: (rows,) predicted and true class numbers."""
    return Judgement({"accuracy": (found == labels).astype(float)}, partial(show, found, labels, names))


def show(found: np.ndarray, labels: np.ndarray, names: list[str]) -> Shown:
    """The confusion matrix of the classes with most errors."""
    confusion = confusion_matrix(found, labels, len(names))
    wrong = confusion.sum(axis=0) + confusion.sum(axis=1) - 2 * confusion.diagonal()
    shown = np.sort(np.argsort(-wrong, kind="stable")[:MOST_CLASSES])
    counts = confusion[np.ix_(shown, shown)]
    shares = counts / np.maximum(confusion.sum(axis=1)[shown, None], 1)
    figure, axes = new_figure("Confusion matrix: rows are true classes", "predicted", "true", height=2.4 + 0.18 * len(shown))
    axes.grid(False)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    ticks = [names[number][:24] for number in shown]
    axes.set_xticks(range(len(shown)), ticks, rotation=60, ha="right")
    axes.set_yticks(range(len(shown)), ticks)
    for row, column in zip(*np.nonzero(counts), strict=True):
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=6, color=color)
    return Shown({"confusion_matrix": figure}, [])
