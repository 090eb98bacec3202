"""Figures for classification of pictures."""

from __future__ import annotations

from functools import partial

import numpy as np

from finetune.metrics.single_label import confusion_matrix
from finetune.reports.figures import matrix
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
    title, ticks = "Confusion matrix: rows are true classes", [names[number] for number in shown]
    figure = matrix(title, counts, ticks, x="predicted", y="true", shares=shares)
    return Shown({"confusion_matrix": figure}, [])
