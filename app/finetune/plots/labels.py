"""Figures and tables for multi-label classification."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.metrics.multilabel import calibration_bins, expected_calibration_error
from finetune.reports.figures import BLUE, COLORS, GREY, NAME, legend_below, matrix, new_figure
from finetune.task import Section, Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS, MOST_CURVES, MOST_CONFUSED, MOST_ROWS = 30, 9, 15, 20
CHARACTERS = 300  # of a text
Judged = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def show(judged: Callable[[], Judged], names: list[str], texts: Any) -> Shown:
    """Figures and the worst rows. `judged` gives probabilities and labels, (rows, labels) of 0 and 1; the model's thresholds,
    (labels,); and decisions, (rows, labels) bool, by thresholds that have not seen the row. `texts`: by row."""
    chances, labels, thresholds, decided = judged()
    shown = figures(chances, labels, thresholds, decided, names)
    return Shown(shown, [worst_rows(chances, labels, decided, names, texts)])


def row_scores(chances: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Scores of each row, (rows,), at a threshold of 0.5, by the name of the metric that their mean is."""
    decided, wanted = chances > 0.5, labels > 0
    total = decided.sum(axis=1) + wanted.sum(axis=1)
    f1 = 2 * (decided & wanted).sum(axis=1) / np.maximum(total, 1)
    return {"f1_samples": f1, "subset_accuracy": (decided == wanted).all(axis=1).astype(float)}


def figures(
    chances: np.ndarray, labels: np.ndarray, thresholds: np.ndarray, decided: np.ndarray, names: list[str]
) -> dict[str, Figure]:
    """Figures by name; no label without a row is drawn."""
    often = np.argsort(-labels.sum(axis=0), kind="stable")
    often = often[labels.sum(axis=0)[often] > 0]
    if not len(often):
        return {}
    return {
        "label_f1": _f1(decided, labels, names, often[:MOST_BARS]),
        "label_precision_recall": _precision_recall(chances, labels, thresholds, names, often[:MOST_CURVES]),
        "label_calibration": _calibration(chances, labels),
        "label_confusion": _confusion(decided, labels, names, often[:MOST_CONFUSED]),
    }


def worst_rows(chances: np.ndarray, labels: np.ndarray, decided: np.ndarray, names: list[str], texts: Any) -> Section:
    """The rows with the largest binary cross-entropy, worst first."""
    likely = np.clip(np.where(labels > 0, chances, 1 - chances), 1e-12, 1)
    losses = -np.log(likely).mean(axis=1)
    rows = [
        [f"{losses[row]:.4f}", _listed(names, labels[row]), _listed(names, decided[row]), texts[int(row)][:CHARACTERS]]
        for row in np.argsort(-losses, kind="stable")[:MOST_ROWS].tolist()
    ]
    return Section("Worst validation rows", "By loss, worst first.", ["loss", "labels", "predicted", "text"], rows)


def _listed(names: list[str], chosen: np.ndarray) -> str:
    return ", ".join(names[label] for label in np.flatnonzero(chosen)) or "none"


def _f1(decided: np.ndarray, labels: np.ndarray, names: list[str], shown: np.ndarray) -> Figure:
    both = (decided & (labels > 0)).sum(axis=0)
    total = decided.sum(axis=0) + labels.sum(axis=0)
    scores = 2 * both / np.maximum(total, 1)
    figure, axes = new_figure("F1 by label, thresholds from other rows", "F1", height=1.2 + 0.2 * len(shown))
    places = np.arange(len(shown))
    axes.barh(places, scores[shown], color=BLUE)
    axes.set_yticks(places, [f"{names[label][:NAME]} ({int(labels[:, label].sum())})" for label in shown])
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    return figure


def _precision_recall(
    chances: np.ndarray, labels: np.ndarray, thresholds: np.ndarray, names: list[str], shown: np.ndarray
) -> Figure:
    from sklearn.metrics import precision_recall_curve  # half a second, at the end of a run

    figure, axes = new_figure("Precision and recall; dots: the model's thresholds", "recall", "precision", height=4.6)
    for color, label in zip(COLORS, shown, strict=False):
        precision, recall, at = precision_recall_curve(labels[:, label], chances[:, label])
        axes.plot(recall, precision, color=color, linewidth=1.2, label=names[label][:NAME])
        chosen = min(int(np.searchsorted(at, thresholds[label])), len(at) - 1)
        axes.plot(recall[chosen], precision[chosen], "o", color=color, markersize=5)
    legend_below(figure)
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    return figure


def _calibration(chances: np.ndarray, labels: np.ndarray) -> Figure:
    """Share of positive labels by predicted probability, over all labels."""
    sizes, mean, share = calibration_bins(chances, labels)
    title = f"Calibration, all labels; expected error {expected_calibration_error(chances, labels):.4f}"
    figure, axes = new_figure(title, "predicted probability", "share of positives")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    axes.plot(mean[sizes > 0], share[sizes > 0], color=BLUE, marker="o", linewidth=1.4)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return figure


def _confusion(decided: np.ndarray, labels: np.ndarray, names: list[str], shown: np.ndarray) -> Figure:
    """How often a label is predicted wrongly where another one is missed."""
    missed, wrong = (labels > 0) & ~decided, decided & (labels == 0)
    counts = missed[:, shown].T.astype(int) @ wrong[:, shown].astype(int)
    title = "Missed labels (rows), predicted instead (columns)"
    return matrix(title, counts, [names[label] for label in shown])
