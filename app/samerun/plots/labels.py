"""Figures and tables for multi-label classification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from samerun.metrics.multilabel import calibration_bins, expected_calibration_error
from samerun.reports.figures import BLUE, COLORS, GREY, NAME, legend_below, matrix, new_figure
from samerun.task import ReportContent, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS, MOST_CURVES, MOST_CONFUSED, MOST_ROWS = 30, 9, 15, 20
CHARACTERS = 300  # of a text


def show(
    judged: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], names: list[str], texts: Any
) -> ReportContent:
    """Figures and the worst rows. `judged`: probabilities (rows, labels), labels (rows, labels) of 0 and 1,
    thresholds of the model (labels,), predicted (rows, labels) bool, by thresholds chosen on other rows.
    `texts`: by row."""
    probabilities, labels, _, predicted = judged
    worst = worst_rows(probabilities, labels, predicted, names, texts)
    return ReportContent(figures(*judged, names), [worst])


def figures(
    probabilities: np.ndarray,
    labels: np.ndarray,
    thresholds: np.ndarray,
    predicted: np.ndarray,
    names: list[str],
) -> dict[str, Figure]:
    """Figures by name, for the most frequent labels. Labels without a row are left out."""
    frequent = np.argsort(-labels.sum(axis=0), kind="stable")
    frequent = frequent[labels.sum(axis=0)[frequent] > 0]
    if not len(frequent):
        return {}
    return {
        "label_f1": _f1(predicted, labels, names, frequent[:MOST_BARS]),
        "label_precision_recall": _precision_recall(
            probabilities, labels, thresholds, names, frequent[:MOST_CURVES]
        ),
        "label_calibration": _calibration(probabilities, labels),
        "label_confusion": _confusion(predicted, labels, names, frequent[:MOST_CONFUSED]),
    }


def worst_rows(
    probabilities: np.ndarray, labels: np.ndarray, predicted: np.ndarray, names: list[str], texts: Any
) -> Section:
    """The rows with the largest binary cross-entropy, worst first."""
    likelihoods = np.clip(np.where(labels > 0, probabilities, 1 - probabilities), 1e-12, 1)
    losses = -np.log(likelihoods).mean(axis=1)
    rows = [
        [
            f"{losses[row]:.4f}",
            _listed(names, labels[row]),
            _listed(names, predicted[row]),
            texts[int(row)][:CHARACTERS],
        ]
        for row in np.argsort(-losses, kind="stable")[:MOST_ROWS].tolist()
    ]
    return Section(
        "Worst validation rows", "By loss, worst first.", ["loss", "labels", "predicted", "text"], rows
    )


def _listed(names: list[str], chosen: np.ndarray) -> str:
    return ", ".join(names[label] for label in np.flatnonzero(chosen)) or "none"


def _f1(predicted: np.ndarray, labels: np.ndarray, names: list[str], chosen: np.ndarray) -> Figure:
    both = (predicted & (labels > 0)).sum(axis=0)
    total = predicted.sum(axis=0) + labels.sum(axis=0)
    scores = 2 * both / np.maximum(total, 1)
    figure, axes = new_figure("F1 by label, thresholds from other rows", "F1", height=1.2 + 0.2 * len(chosen))
    positions = np.arange(len(chosen))
    axes.barh(positions, scores[chosen], color=BLUE)
    axes.set_yticks(positions, [f"{names[label][:NAME]} ({int(labels[:, label].sum())})" for label in chosen])
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    return figure


def _precision_recall(
    probabilities: np.ndarray,
    labels: np.ndarray,
    thresholds: np.ndarray,
    names: list[str],
    chosen: np.ndarray,
) -> Figure:
    from sklearn.metrics import precision_recall_curve  # takes half a second

    figure, axes = new_figure(
        "Precision and recall; dots: the model's thresholds", "recall", "precision", height=4.6
    )
    for color, label in zip(COLORS, chosen, strict=False):
        precision, recall, curve_thresholds = precision_recall_curve(
            labels[:, label], probabilities[:, label]
        )
        axes.plot(recall, precision, color=color, linewidth=1.2, label=names[label][:NAME])
        point = min(int(np.searchsorted(curve_thresholds, thresholds[label])), len(curve_thresholds) - 1)
        axes.plot(recall[point], precision[point], "o", color=color, markersize=5)
    legend_below(figure)
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    return figure


def _calibration(probabilities: np.ndarray, labels: np.ndarray) -> Figure:
    """Share of positive labels by predicted probability, over all labels."""
    sizes, mean, share = calibration_bins(probabilities, labels)
    title = f"Calibration, all labels; expected error {expected_calibration_error(probabilities, labels):.4f}"
    figure, axes = new_figure(title, "predicted probability", "share of positives")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    axes.plot(mean[sizes > 0], share[sizes > 0], color=BLUE, marker="o", linewidth=1.4)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return figure


def _confusion(predicted: np.ndarray, labels: np.ndarray, names: list[str], chosen: np.ndarray) -> Figure:
    """Numbers of rows with a false negative of one label and a false positive of another."""
    missed, wrong = (labels > 0) & ~predicted, predicted & (labels == 0)
    counts = missed[:, chosen].T.astype(int) @ wrong[:, chosen].astype(int)
    title = "Missed labels (rows), predicted instead (columns)"
    return matrix(title, counts, [names[label] for label in chosen])
