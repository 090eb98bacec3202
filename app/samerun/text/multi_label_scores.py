"""Scores of multi-label classification, thresholds and temperatures fitted on validation rows, and figures.

Conventions, as in scikit-learn with `zero_division=0`; an undefined score is None, never NaN:
- precision without a predicted row, recall without a positive row, and F1 without both are 0. They count in
  averages: a label that never occurs and is never predicted is a 0 in f1_macro, a row without labels and
  predictions a 0 in f1_samples;
- ROC AUC needs both classes of a label, average precision a positive row. Macro averages are over the labels
  for which they are defined, whose numbers are `roc_auc_macro_labels` and `average_precision_macro_labels`;
  `average_precision_micro` is of all cells together;
- lrap (label ranking average precision) is 1 for rows with no label or with every label.

All equal scikit-learn's, which takes ten times as long for thousands of labels, and for some scores six times
the memory. It takes a single label for a binary target, which has other averages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from samerun.reports.figures import BLUE, COLORS, GREY, NAME, bars, legend_below, matrix, new_figure
from samerun.reports.page import worst_rows
from samerun.task import ReportContent, Section
from samerun.text.losses import MultiLabelLoss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECISION_METRICS = (
    "f1_micro",
    "f1_macro",
    "f1_samples",
    "precision_micro",
    "recall_micro",
    "precision_macro",
    "recall_macro",
    "hamming_loss",
    "subset_accuracy",
)
RANKING_METRICS = (
    "roc_auc_macro",
    "roc_auc_macro_labels",
    "average_precision_macro",
    "average_precision_macro_labels",
    "average_precision_micro",
    "lrap",
)
METRICS = ("loss", *DECISION_METRICS, *RANKING_METRICS, *(f"tuned_{name}" for name in DECISION_METRICS))
CALIBRATION_BINS = 15  # as in Guo et al., arXiv:1706.04599, section 4
# Positive rows that the thresholds for F1 add to each label's (benchmarks/quality.md, "Thresholds")
PRIOR = 10.0
NEARLY = 0.98  # share of the best micro-F1
TINY = 1e-12
FOLDS = 5  # of the cross-validation of thresholds
MOST_CELLS = 1 << 18  # to which Platt's scaling is fitted
TEMPERATURE_RANGE = 0.05, 20.0  # perfectly separated labels would have no lowest temperature
MIN_CALIBRATION_ROWS = 10  # for a temperature; with a label, and without it, for one of its own
MOST_COMPARED = 50_000  # true labels of a row times all labels
HALVINGS = 30  # of the range of temperatures: a relative precision of 6e-9
MAX_BARS, MAX_CURVES, MAX_CONFUSED = 30, 9, 15  # in figures


# Scores


def multilabel_scores(
    logits: np.ndarray, targets: np.ndarray, loss: float | None, tuned: np.ndarray
) -> dict[str, float | None]:
    """METRICS: `loss`, DECISION_METRICS at 0.5 and as `tuned_*` of the decisions `tuned`, RANKING_METRICS.

    `logits`, `targets` of 0 and 1, `tuned` of bool: (rows, labels). Without cells every score is None.
    """
    probabilities, targets = sigmoid(logits), np.asarray(targets, dtype=bool)
    scores = {"loss": loss, **decision_scores(probabilities >= 0.5, targets)}
    scores |= ranking_scores(probabilities, targets)
    return scores | {f"tuned_{name}": score for name, score in decision_scores(tuned, targets).items()}


def decision_scores(predicted: np.ndarray, targets: np.ndarray) -> dict[str, float | None]:
    """DECISION_METRICS of bool matrices (rows, labels)."""
    if not targets.size:
        return dict.fromkeys(DECISION_METRICS)
    precision, recall, f1 = precision_recall_f1(predicted, targets, axis=0)
    precision_micro, recall_micro, f1_micro = precision_recall_f1(predicted, targets, axis=None)
    wrong = predicted != targets
    scores = {
        "f1_micro": f1_micro,
        "f1_macro": f1.mean(),
        "f1_samples": precision_recall_f1(predicted, targets, axis=1)[2].mean(),
        "precision_micro": precision_micro,
        "recall_micro": recall_micro,
        "precision_macro": precision.mean(),
        "recall_macro": recall.mean(),
        "hamming_loss": wrong.mean(),
        "subset_accuracy": 1 - wrong.any(axis=1).mean(),
    }
    return {name: float(score) for name, score in scores.items()}


def ranking_scores(probabilities: np.ndarray, targets: np.ndarray) -> dict[str, float | None]:
    """RANKING_METRICS, which need no thresholds. `probabilities`, `targets` of bool: (rows, labels)."""
    if not targets.size:
        return dict.fromkeys(RANKING_METRICS)
    scores: dict[str, float | None] = {}
    names = ("roc_auc_macro", "average_precision_macro")
    for name, of_labels in zip(names, ranking_by_label(probabilities, targets), strict=True):
        defined = of_labels[~np.isnan(of_labels)]
        scores |= {name: float(defined.mean()) if len(defined) else None, f"{name}_labels": len(defined)}
    micro = area_and_precision(probabilities, targets)[1]
    scores["average_precision_micro"] = None if np.isnan(micro) else micro
    return {**scores, "lrap": float(label_ranking_average_precision(probabilities, targets).mean())}


def area_and_precision(scores: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """(ROC AUC, average precision); NaN where undefined. `scores`, `truth` of bool: of the same shape.

    The area is the share of pairs of a true and a false cell in which the true one has the higher score;
    equal scores count half. The precision is the mean over the true cells of the share of true cells among
    those with at least their score.
    """
    ranked, of_true = np.sort(scores, axis=None), np.sort(scores[truth])
    cells, true = len(ranked), len(of_true)
    if not true:
        return np.nan, np.nan
    below = np.searchsorted(ranked, of_true)
    precision = float(((true - np.searchsorted(of_true, of_true)) / (cells - below)).mean())
    if true == cells:
        return np.nan, precision
    ranks = (below + np.searchsorted(ranked, of_true, side="right") + 1) / 2
    return float((ranks.mean() - (true + 1) / 2) / (cells - true)), precision


def label_ranking_average_precision(probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(rows,) average precision of a row's labels, 1 for a row without labels."""
    total, support = np.zeros(len(targets)), targets.sum(axis=1)
    compares = support * targets.shape[1] <= MOST_COMPARED  # else sorting the row is faster
    for probability, true in zip(probabilities.T, targets.T, strict=True):
        rows = true & compares
        at_least = probabilities[rows] >= probability[rows, None]
        total[rows] += (at_least & targets[rows]).sum(axis=1) / at_least.sum(axis=1)
    for row in np.flatnonzero(~compares):
        total[row] = support[row] * area_and_precision(probabilities[row], targets[row])[1]
    return np.where(support == 0, 1, total / np.maximum(support, 1))


def precision_recall_f1(
    predicted: np.ndarray, targets: np.ndarray, axis: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Precision, recall and F1 of bool matrices, counted along `axis` (None: over all cells)."""
    hits = (predicted & targets).sum(axis=axis)
    n_predicted, n_positive = predicted.sum(axis=axis), targets.sum(axis=axis)
    # There are no hits wherever the denominator is 0, so a denominator of 1 gives the conventional 0.
    return (
        hits / np.maximum(n_predicted, 1),
        hits / np.maximum(n_positive, 1),
        2 * hits / np.maximum(n_predicted + n_positive, 1),
    )


def ranking_by_label(probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(2, labels) ROC AUC and average precision; NaN where undefined."""
    columns = zip(probabilities.T, targets.T, strict=True)
    return np.array([area_and_precision(*column) for column in columns]).reshape(-1, 2).T


def per_label_table(
    probabilities: np.ndarray,
    targets: np.ndarray,
    thresholds: np.ndarray,
    names: Sequence[str],
    decisions: np.ndarray,
) -> list[dict[str, str | int | float | None]]:
    """One row per label: label, support (positive rows), threshold, precision, recall, f1, roc_auc,
    average_precision. The mean of a column over its defined entries is the macro metric.

    `probabilities`, `targets` and `decisions`: (rows, labels); `thresholds` (labels,) are shown, `decisions`
    scored.
    """
    targets = np.asarray(targets, dtype=bool)
    columns: dict[str, list] = {
        "label": list(names),
        "support": targets.sum(axis=0).tolist(),
        "threshold": thresholds.tolist(),
    }
    scores = *precision_recall_f1(decisions, targets, axis=0), *ranking_by_label(probabilities, targets)
    score_names = ("precision", "recall", "f1", "roc_auc", "average_precision")
    for name, of_labels in zip(score_names, scores, strict=True):
        columns[name] = [None if np.isnan(x) or not len(targets) else x for x in of_labels.tolist()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def calibration_bins(
    probabilities: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(number of cells, mean probability, share of positives), (CALIBRATION_BINS,) each, in bins of equal
    width over all rows and labels; 0 in empty bins."""
    probabilities, targets = probabilities.ravel(), targets.ravel()
    bins = np.minimum((probabilities * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    sizes = np.bincount(bins, minlength=CALIBRATION_BINS)
    sums = (np.bincount(bins, weights, minlength=CALIBRATION_BINS) for weights in (probabilities, targets))
    return sizes, *(total / np.maximum(sizes, 1) for total in sums)


def expected_calibration_error(probabilities: np.ndarray, targets: np.ndarray) -> float | None:
    """The mean difference of probability and share of positives over `calibration_bins`, weighted by size
    (Guo et al., arXiv:1706.04599, equation 3, over all labels instead of the top one); None without cells."""
    sizes, mean, share = calibration_bins(probabilities, targets)
    return float((np.abs(mean - share) * sizes).sum() / sizes.sum()) if sizes.sum() else None


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The logistic function, in float64."""
    with np.errstate(over="ignore"):  # one by infinity is 0
        return 1 / (1 + np.exp(-np.asarray(logits, dtype=np.float64)))


# Thresholds


@dataclass(frozen=True)
class Objective:
    """The objective of threshold tuning: "f1"; "precision_at_recall", the highest precision with a recall of
    at least `target`; "recall_at_precision", the reverse; "cost", the lowest (false positives + `miss_cost` *
    false negatives)."""

    name: str = "f1"
    target: float = 0.0
    miss_cost: float = 1.0

    def values(
        self, hits: np.ndarray, predicted: np.ndarray, positive: float
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns (value of each of k cuts, tie-breaker of each, value of predicting nothing). Higher is
        better; cuts that miss the target are minus infinity. `hits`: (k,) true positives, `predicted`: (k,)
        predicted rows, `positive`: positive rows. Not for "f1": see `_mean_f1`."""
        if self.name == "cost":
            cost = predicted - hits + self.miss_cost * (positive - hits)
            return -cost, np.zeros(hits.shape), -self.miss_cost * positive
        precision, recall = hits / predicted, hits / positive
        if self.name == "precision_at_recall":
            return np.where(recall >= self.target, precision, -np.inf), recall, -1.0
        return np.where(precision >= self.target, recall, -np.inf), precision, 0.0


F1 = Objective()


def tune_thresholds(probabilities: np.ndarray, targets: np.ndarray, objective: Objective = F1) -> np.ndarray:
    """(labels,) float64 thresholds for the objective. `probabilities`: (rows, labels) in [0, 1]; `targets`:
    (rows, labels) of 0 and 1.

    For F1 they maximize the mean of micro-F1 and macro-F1. Few positive rows tell little about a label's
    threshold, so PRIOR positive rows are added to them, which lie as the model's own probabilities say. For
    other objectives labels without positives or negatives keep 0.5; without any positive all are 0.5.

    A threshold lies between two adjacent distinct scores, or beyond all: as near as possible to 0.5, for F1
    to a threshold that serves all labels, but an eighth of the gap away from both scores, so that round-off
    does not change decisions. Of equally good ones it is the nearest, then the higher one.

    F1 on the rows that tuned the thresholds is optimistic, the more the fewer positives a label has: see
    `ThresholdTuner.decide`.
    """
    targets = np.asarray(targets, dtype=bool)
    support = targets.sum(axis=0)
    tuned, values_of, near = np.full(len(support), 0.5), objective.values, 0.5
    if not support.any():
        return tuned
    if objective.name == "f1":
        slope, offset, micro_f1, near = _all_labels(probabilities, targets)
        values_of = partial(_mean_f1, micro_f1, len(support) / (2 * support.sum()))
    for label, (scores, truth) in enumerate(zip(probabilities.T, targets.T, strict=True)):
        if objective.name == "f1":
            expected = sigmoid(slope * _log_odds(scores) + offset) + TINY
            added = PRIOR / expected.sum()
            truth = (truth + added * expected) / (1 + added)
        if truth.min() < truth.max():
            tuned[label] = _best_cut(scores, truth, values_of, near)
    return tuned


def _all_labels(probabilities: np.ndarray, targets: np.ndarray) -> tuple[float, float, float, float]:
    """What serves all labels: slope and offset of Platt's scaling of the log-odds, as a loss or weights may
    have moved them; the best micro-F1 of a single threshold; the lowest threshold with nearly that micro-F1.
    Of every nth row, if there are many cells."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import precision_recall_curve

    step = -(-targets.size // MOST_CELLS)
    scores, truth = probabilities[::step].ravel(), targets[::step].ravel()
    if truth.all() or not truth.any():
        return 1.0, 0.0, 0.5, 0.5
    platt = LogisticRegression().fit(_log_odds(scores)[:, None], truth)
    precision, recall, thresholds = precision_recall_curve(truth, scores)
    f1 = 2 * precision * recall / np.maximum(precision + recall, TINY)
    near = thresholds[np.argmax(f1 >= NEARLY * f1.max())]
    return platt.coef_.item(), platt.intercept_.item(), f1.max(), near


def _log_odds(probabilities: np.ndarray) -> np.ndarray:
    bounded = np.clip(probabilities, TINY, 1 - TINY)
    return np.log(bounded) - np.log1p(-bounded)


def _mean_f1(
    micro_f1: float, weight: float, hits: np.ndarray, predicted: np.ndarray, positive: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Like `Objective.values`: a label's F1, and what its decisions add to micro-F1, times `weight`. Near
    micro-F1 m, a hit adds in proportion to 2 - m and a false positive to -m (Dinkelbach, 1967)."""
    value = 2 * hits / (predicted + positive) + weight * (2 * hits - micro_f1 * predicted)
    return value.round(10), np.zeros(hits.shape), 0.0  # equal values must be equal floats


def _best_cut(scores: np.ndarray, truth: np.ndarray, values_of: Callable[..., tuple], near: float) -> float:
    """The best threshold for the (k,) scores of a label, `truth` between 0 and 1, and values as those of
    `Objective.values`; of equally good ones the nearest to `near`."""
    order = np.argsort(-scores)
    scores, hits = scores[order], np.cumsum(truth[order])
    # Entry i: the i + 1 highest scores are predicted.
    values, tie_breaker, value_of_none = values_of(hits, np.arange(1, len(hits) + 1), hits[-1])
    values[:-1][scores[:-1] == scores[1:]] = -np.inf  # no threshold separates equal scores
    best = np.flatnonzero(values == values.max())
    best = best[tie_breaker[best] == tie_breaker[best].max()]
    high, low = scores[best], np.append(scores[1:], 0.0)[best]
    if value_of_none > values.max():
        high, low = np.maximum([1.0], np.nextafter(scores[:1], 2)), scores[:1]
    margin = (high - low) / 8
    cuts = np.clip(near, low + margin, high - margin)
    cuts = np.where(cuts > low, cuts, high)  # nothing lies between adjacent floats
    return cuts[np.abs(cuts - near).argmin()]


# Calibration


def fit_temperatures(logits: np.ndarray, targets: np.ndarray, per_label: bool) -> np.ndarray:
    """(labels,) the temperatures T with the lowest binary cross-entropy of sigmoid(logits / T) (Guo et al.,
    arXiv:1706.04599, section 4.2, with a sigmoid in place of the softmax).

    `logits` and `targets` of 0 and 1: (rows, labels). All labels share one temperature. With `per_label`
    labels with at least MIN_CALIBRATION_ROWS positive and negative rows have their own.
    """
    logits, targets = np.asarray(logits, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    temperatures = np.full(logits.shape[1], _bisect(logits.reshape(-1, 1), targets.reshape(-1, 1))[0])
    if per_label:
        support = targets.sum(axis=0)
        enough = np.minimum(support, len(targets) - support) >= MIN_CALIBRATION_ROWS
        temperatures[enough] = _bisect(logits[:, enough], targets[:, enough])
    return temperatures


def _bisect(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(m,) temperatures of the columns of (rows, m)."""
    return lowest_temperatures(
        lambda middle: (logits * (sigmoid(logits / middle) - targets)).sum(axis=0), logits.shape[1]
    )


def lowest_temperatures(slope: Callable[[np.ndarray], np.ndarray], size: int) -> np.ndarray:
    """(size,) temperatures with the lowest cross-entropy, by bisection: it is convex in 1 / T, so its slope
    changes its sign at most once. `slope`: temperatures -> slopes with respect to 1 / T."""
    low, high = (np.full(size, bound) for bound in TEMPERATURE_RANGE)
    for _ in range(HALVINGS):
        middle = np.sqrt(low * high)
        rises = slope(middle) > 0
        low, high = np.where(rises, middle, low), np.where(rises, high, middle)
    return np.sqrt(low * high)


# From logits to decisions


def folds(rows: int, seed: int) -> list[np.ndarray]:
    """(rows,) bool masks of at most FOLDS random folds."""
    fold_of = np.empty(rows, dtype=int)
    fold_of[np.random.default_rng(seed).permutation(rows)] = np.arange(rows) % FOLDS
    return [fold_of == number for number in range(min(FOLDS, rows))]


class Thresholds(NamedTuple):
    """Temperatures of the logits and thresholds of the calibrated probabilities, (labels,) each."""

    temperatures: np.ndarray
    values: np.ndarray
    tuning: dict[str, Any] | None = None  # how they were tuned, for the model's configuration; None if fixed

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Calibrated probabilities of logits (rows, labels) or (labels,)."""
        return sigmoid(logits / self.temperatures)


@dataclass(frozen=True)
class ThresholdTuner:
    """Fits temperatures and thresholds."""

    fixed: np.ndarray | None = None  # (labels,) thresholds of --threshold
    objective: Objective = F1
    calibration: str = "none"  # --calibration
    seed: int = 0  # of the folds
    tuned_on: str | None = None  # hash of the rows on which a trained model's thresholds were tuned
    temperatures: np.ndarray | float = 1.0  # by which a trained model's logits are already divided

    def of_trained(self, config: Any) -> ThresholdTuner:
        """The tuner of a trained model's thresholds, from its configuration; `self` for fixed thresholds."""
        tuning = getattr(config, "threshold_tuning", None)
        if tuning is None or self.fixed is not None:
            return self
        objective, temperatures = Objective(**tuning["objective"]), getattr(config, "temperatures", None)
        own = replace(self, objective=objective, seed=tuning["seed"], tuned_on=tuning["rows"])
        return replace(own, temperatures=1.0 if temperatures is None else np.asarray(temperatures))

    def fit(self, logits: np.ndarray, targets: np.ndarray) -> Thresholds:
        """Fits temperatures and thresholds on all rows; logits and targets: (rows, labels)."""
        temperatures = np.ones(logits.shape[1])
        if self.calibration != "none" and len(logits):
            temperatures = fit_temperatures(logits, targets, self.calibration == "temperature_per_label")
        thresholds = self.fixed
        if thresholds is None:
            thresholds = tune_thresholds(sigmoid(logits / temperatures), targets, self.objective)
        return Thresholds(temperatures, thresholds)

    def calibrated(self, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """(rows, labels) calibrated logits by cross-validation: each of at most FOLDS random folds uses
        temperatures fitted on the others. Scores of the rows that the fit has seen would be too good."""
        if self.calibration == "none":
            return logits
        calibrated = np.array(logits, dtype=np.float64)
        per_label = self.calibration == "temperature_per_label"
        for fold in folds(len(logits), self.seed):
            calibrated[fold] /= fit_temperatures(logits[~fold], targets[~fold], per_label)
        return calibrated

    def decide(
        self, logits: np.ndarray, targets: np.ndarray, thresholds: np.ndarray | None, rows: str
    ) -> np.ndarray:
        """(rows, labels) bool decisions at a trained model's thresholds. Without thresholds, and for the rows
        on which they were tuned, each fold's are at thresholds tuned on the others, so that evaluating an
        exported model repeats the scores of its training. `rows`: hash of the rows."""
        if thresholds is not None and self.tuned_on != rows:
            return sigmoid(logits) >= thresholds
        logits = logits * self.temperatures
        if self.fixed is not None:
            return sigmoid(self.calibrated(logits, targets)) >= self.fixed
        decisions = np.zeros(logits.shape, dtype=bool)
        for fold in folds(len(logits), self.seed):
            # Before calibration: a threshold between calibrated scores decides a few rows otherwise.
            tuned = tune_thresholds(sigmoid(logits[~fold]), targets[~fold], self.objective)
            decisions[fold] = sigmoid(logits[fold]) >= tuned
        return decisions

    def report(
        self, logits: np.ndarray, targets: np.ndarray, names: Sequence[str], rows: str
    ) -> tuple[Thresholds, dict[str, Any]]:
        """(temperatures and thresholds to export, entries of metrics.json). The entries: the table of labels,
        with the exported thresholds and the scores of held-out decisions, and calibration errors. `rows`:
        hash of the rows."""
        fitted, decisions = self.fit(logits, targets), self.decide(logits, targets, None, rows)
        if self.fixed is None:
            tuning = {"objective": asdict(self.objective), "seed": self.seed, "rows": rows}
            fitted = fitted._replace(tuning=tuning)
        metrics: dict[str, Any] = {
            "eval_per_label": per_label_table(sigmoid(logits), targets, fitted.values, names, decisions),
            "eval_ece": expected_calibration_error(sigmoid(logits), targets),
        }
        if self.fixed is None:
            metrics["eval_tuned_folds"] = min(FOLDS, len(logits))
        if self.calibration != "none":
            calibrated = self.calibrated(logits, targets)
            metrics["eval_calibrated_ece"] = expected_calibration_error(sigmoid(calibrated), targets)
            entropy = MultiLabelLoss().mean
            metrics["eval_binary_cross_entropy"] = entropy(logits, targets)
            metrics["eval_calibrated_binary_cross_entropy"] = entropy(calibrated, targets)
        return fitted, metrics


# Figures


def report_content(
    tuner: ThresholdTuner, logits: np.ndarray, targets: np.ndarray, names: Sequence[str], split: Any
) -> ReportContent:
    """Figures of the most frequent labels and the rows with the largest binary cross-entropy. `logits` and
    `targets`: (rows, labels); `split`: their `TextSplit`."""
    probabilities, truth = sigmoid(tuner.calibrated(logits, targets)), targets.astype(bool)
    predicted = tuner.decide(logits, targets, None, "")
    losses = -np.log(np.clip(np.where(truth, probabilities, 1 - probabilities), 1e-12, 1)).mean(axis=1)
    listed = (
        [" | ".join(names[label] for label in np.flatnonzero(row)) or "none" for row in matrix]
        for matrix in (truth, predicted)
    )
    rows = worst_texts(losses, dict(zip(("labels", "predicted"), listed, strict=True)), split)
    drawn = figures(probabilities, truth, tuner.fit(logits, targets), logits, predicted, names)
    return ReportContent(drawn, [rows])


def worst_texts(losses: np.ndarray, columns: dict[str, Sequence[str]], split: Any) -> Section:
    """`worst_rows` with the texts of `split`, a `TextSplit`."""
    pairs = {} if split.pairs is None else {"text_pair": split.pairs}
    return worst_rows(losses, {**columns, "text": split.texts, **pairs})


def figures(
    probabilities: np.ndarray,
    targets: np.ndarray,
    fitted: Thresholds,
    logits: np.ndarray,
    predicted: np.ndarray,
    names: Sequence[str],
) -> dict[str, Figure]:
    """Figures by name. `probabilities`, `targets`, `logits` and `predicted` of bool: (rows, labels), held out
    but for the `logits`, which the model's own thresholds decide. Labels without a row are left out."""
    support = targets.sum(axis=0)
    frequent = np.argsort(-support, kind="stable")
    frequent = frequent[support[frequent] > 0]
    if not len(frequent):
        return {}
    shown = [(label, names[label]) for label in frequent.tolist()]

    f1 = precision_recall_f1(predicted, targets, axis=0)[2]
    ticks = [f"{name[:NAME]} ({support[label]})" for label, name in shown[:MAX_BARS]]
    title, values = "F1 by label, thresholds from other rows", f1[frequent[:MAX_BARS]]
    missed, wrong = targets & ~predicted, predicted & ~targets
    confused = frequent[:MAX_CONFUSED]
    counts = missed[:, confused].T.astype(int) @ wrong[:, confused].astype(int)
    of_counts = "Missed labels (rows), predicted instead (columns)"
    # Not of `probabilities`: each fold has temperatures of its own, which mix up the order of rows.
    of_model = fitted.probabilities(logits)
    curves = _precision_recall_curves(of_model, targets, fitted.values, shown[:MAX_CURVES])
    return {
        "label_f1": bars(title, "F1", ticks, values),
        "label_precision_recall": curves,
        "label_calibration": _calibration_curve(probabilities, targets),
        "label_confusion": matrix(of_counts, counts, [names[label] for label in confused]),
    }


def _precision_recall_curves(
    probabilities: np.ndarray, targets: np.ndarray, thresholds: np.ndarray, shown: list[tuple[int, str]]
) -> Figure:
    from sklearn.metrics import precision_recall_curve

    title = "Precision and recall; dots: the model's thresholds"
    figure, axes = new_figure(title, "recall", "precision", height=4.6)
    for color, (label, name) in zip(COLORS, shown, strict=False):
        precision, recall, cuts = precision_recall_curve(targets[:, label], probabilities[:, label])
        axes.plot(recall, precision, color=color, linewidth=1.2, label=name[:NAME])
        point = int(np.searchsorted(cuts, thresholds[label]))  # above all cuts: the curve's end, no row
        axes.plot(recall[point], precision[point], "o", color=color, markersize=5)
    legend_below(figure)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
    return figure


def _calibration_curve(probabilities: np.ndarray, targets: np.ndarray) -> Figure:
    sizes, mean, share = calibration_bins(probabilities, targets)
    error = expected_calibration_error(probabilities, targets)
    title = f"Calibration, all labels; expected error {error:.4f}"
    figure, axes = new_figure(title, "predicted probability", "share of positives")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    axes.plot(mean[sizes > 0], share[sizes > 0], color=BLUE, marker="o", linewidth=1.4)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    return figure
