"""Figures and tables for multi-label classification."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.metrics.thresholds import decide, tune_thresholds
from finetune.reports.figures import BLUE, COLORS, GREY, matrix, new_figure
from finetune.task import Judgement, Section, Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS, MOST_CURVES, MOST_CONFUSED, MOST_ROWS = 30, 9, 15, 20
CHARACTERS = 300  # of a text


def judge(chances: np.ndarray, labels: np.ndarray, names: list[str], texts: Any) -> Judgement:
    """`chances` and `labels`: (rows, labels), probabilities and 0 or 1; `texts`: by row."""
    return Judgement(row_scores(chances, labels), partial(show, chances, labels, names, texts))


def show(chances: np.ndarray, labels: np.ndarray, names: list[str], texts: Any) -> Shown:
    """Figures and the worst rows, at thresholds tuned on these rows."""
    thresholds = tune_thresholds(chances, labels)
    return Shown(figures(chances, labels, thresholds, names), [worst_rows(chances, labels, thresholds, names, texts)])


def row_scores(chances: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Scores of each row, (rows,), at a threshold of 0.5, by the name of the metric that their mean is."""
    decided, wanted = chances > 0.5, labels > 0
    total = decided.sum(axis=1) + wanted.sum(axis=1)
    f1 = 2 * (decided & wanted).sum(axis=1) / np.maximum(total, 1)
    return {"f1_samples": f1, "subset_accuracy": (decided == wanted).all(axis=1).astype(float)}


def figures(chances: np.ndarray, labels: np.ndarray, thresholds: np.ndarray, names: list[str]) -> dict[str, Figure]:
    """Figures by name; no label without a row is drawn."""
    often = np.argsort(-labels.sum(axis=0), kind="stable")
    often = often[labels.sum(axis=0)[often] > 0]
    if not len(often):
        return {}
    return {
        "label_f1": _f1(chances, labels, thresholds, names, often[:MOST_BARS]),
        "label_precision_recall": _precision_recall(chances, labels, thresholds, names, often[:MOST_CURVES]),
        "label_calibration": _calibration(chances, labels),
        "label_confusion": _confusion(decide(chances, thresholds), labels, names, often[:MOST_CONFUSED]),
    }


def worst_rows(chances: np.ndarray, labels: np.ndarray, thresholds: np.ndarray, names: list[str], texts: Any) -> Section:
    """The rows with the largest binary cross-entropy, worst first."""
    likely = np.clip(np.where(labels > 0, chances, 1 - chances), 1e-12, 1)
    losses = -np.log(likely).mean(axis=1)
    decided = decide(chances, thresholds)
    rows = [
        [f"{losses[row]:.4f}", _listed(names, labels[row]), _listed(names, decided[row]), texts[int(row)][:CHARACTERS]]
        for row in np.argsort(-losses, kind="stable")[:MOST_ROWS].tolist()
    ]
    return Section("Worst validation rows", "By loss, worst first.", ["loss", "labels", "predicted", "text"], rows)


def _listed(names: list[str], chosen: np.ndarray) -> str:
    return ", ".join(names[label] for label in np.flatnonzero(chosen)) or "none"


def _f1(chances: np.ndarray, labels: np.ndarray, thresholds: np.ndarray, names: list[str], shown: np.ndarray) -> Figure:
    decided = decide(chances, thresholds)
    both = (decided & (labels > 0)).sum(axis=0)
    total = decided.sum(axis=0) + labels.sum(axis=0)
    scores = 2 * both / np.maximum(total, 1)
    figure, axes = new_figure("F1 by label, at the tuned thresholds", "F1", height=1.2 + 0.2 * len(shown))
    places = np.arange(len(shown))
    axes.barh(places, scores[shown], color=BLUE)
    axes.set_yticks(places, [f"{names[label][:40]} ({int(labels[:, label].sum())})" for label in shown])
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    return figure


def _precision_recall(
    chances: np.ndarray, labels: np.ndarray, thresholds: np.ndarray, names: list[str], shown: np.ndarray
) -> Figure:
    from sklearn.metrics import precision_recall_curve  # half a second, at the end of a run

    figure, axes = new_figure("Precision and recall; dots: the tuned thresholds", "recall", "precision", height=4.4)
    for color, label in zip(COLORS, shown, strict=False):
        precision, recall, at = precision_recall_curve(labels[:, label], chances[:, label])
        axes.plot(recall, precision, color=color, linewidth=1.2, label=names[label][:40])
        chosen = min(int(np.searchsorted(at, thresholds[label])), len(at) - 1)
        axes.plot(recall[chosen], precision[chosen], "o", color=color, markersize=5)
    axes.legend(fontsize=7, frameon=False, loc="lower left")
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    return figure


def _calibration(chances: np.ndarray, labels: np.ndarray) -> Figure:
    """Share of positive labels by predicted probability, over all labels, in ten bins; the expected calibration error (Guo et
    al., arXiv:1706.04599) is the bins' mean distance from the diagonal, weighted by their size."""
    bins = np.minimum((chances * 10).astype(int), 9).ravel()
    sizes = np.bincount(bins, minlength=10)
    mean = np.bincount(bins, chances.ravel(), minlength=10) / np.maximum(sizes, 1)
    share = np.bincount(bins, labels.ravel(), minlength=10) / np.maximum(sizes, 1)
    error = float((np.abs(mean - share) * sizes).sum() / sizes.sum())
    title = f"Calibration over all labels; expected calibration error {error:.4f}"
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
    title = "Label missed (rows) while another was predicted wrongly (columns)"
    return matrix(title, counts, [names[label] for label in shown])
