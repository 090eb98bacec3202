"""Figures for image classification."""

from __future__ import annotations

from functools import partial

import numpy as np

from samerun.metrics.single_label import confusion_matrix, decision_scores
from samerun.reports.figures import matrix
from samerun.task import Analysis, ReportContent

MOST_CLASSES = 30


def analyse(predicted: np.ndarray, labels: np.ndarray, names: list[str]) -> Analysis:
    """`predicted` and `labels`: (rows,) predicted and true class numbers."""
    return Analysis(
        partial(metrics_of_rows, predicted, labels, len(names)), partial(show, predicted, labels, names)
    )


def metrics_of_rows(
    predicted: np.ndarray, labels: np.ndarray, num_classes: int, rows: np.ndarray
) -> dict[str, float]:
    """accuracy and f1_macro of some rows. `predicted` and `labels`: (rows,) of all."""
    return decision_scores(confusion_matrix(predicted[rows], labels[rows], num_classes))


def show(predicted: np.ndarray, labels: np.ndarray, names: list[str]) -> ReportContent:
    """The confusion matrix, for the classes with the most errors."""
    confusion = confusion_matrix(predicted, labels, len(names))
    errors = confusion.sum(axis=0) + confusion.sum(axis=1) - 2 * confusion.diagonal()
    chosen = np.sort(np.argsort(-errors, kind="stable")[:MOST_CLASSES])
    counts = confusion[np.ix_(chosen, chosen)]
    shares = counts / np.maximum(confusion.sum(axis=1)[chosen, None], 1)
    title, ticks = "Confusion matrix: rows are true classes", [names[number] for number in chosen]
    figure = matrix(title, counts, ticks, x="predicted", y="true", shares=shares)
    return ReportContent({"confusion_matrix": figure}, [])
