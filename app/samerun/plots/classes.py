"""Figures for image classification."""

from __future__ import annotations

import numpy as np

from samerun.metrics.single_label import confusion_matrix
from samerun.reports.figures import matrix
from samerun.task import ReportContent

MOST_CLASSES = 30


def show(predicted: np.ndarray, labels: np.ndarray, names: list[str]) -> ReportContent:
    """The confusion matrix, for the classes with the most errors. `predicted` and `labels`: (rows,) predicted
    and true class numbers."""
    confusion = confusion_matrix(predicted, labels, len(names))
    errors = confusion.sum(axis=0) + confusion.sum(axis=1) - 2 * confusion.diagonal()
    chosen = np.sort(np.argsort(-errors, kind="stable")[:MOST_CLASSES])
    counts = confusion[np.ix_(chosen, chosen)]
    shares = counts / np.maximum(confusion.sum(axis=1)[chosen, None], 1)
    title, ticks = "Confusion matrix: rows are true classes", [names[number] for number in chosen]
    figure = matrix(title, counts, ticks, x="predicted", y="true", shares=shares)
    return ReportContent({"confusion_matrix": figure}, [])
