"""Multi-label classification metrics. An undefined metric is None: never NaN, never a warning.

Conventions, as in scikit-learn with `zero_division=0`:
- precision without a predicted row, recall without a positive row, and F1 without both are 0. They count in
  averages: a label that never occurs and is never predicted is a 0 in f1_macro, a row without labels and
  predictions a 0 in f1_samples;
- ROC AUC needs both classes of a label, average precision a positive row. Macro averages are over the labels
  for which they are defined; `roc_auc_macro_labels` and `average_precision_macro_labels` are the numbers of
  these labels;
- lrap (label ranking average precision) is 1 for rows with no label or with every label;
- without rows or labels every metric is None.

Rankings are scored by scikit-learn. Decisions are counted here, once for all averages; scikit-learn takes a
file with one label for a binary target, which has other averages."""

from collections.abc import Sequence

import numpy as np

from samerun.metrics.thresholds import checked_matrices, decide, tune_thresholds

CALIBRATION_BINS = 15  # as in Guo et al., arXiv:1706.04599, section 4

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
    "lrap",
)
METRICS = ("loss", *DECISION_METRICS, *RANKING_METRICS, *(f"tuned_{name}" for name in DECISION_METRICS))


def multilabel_scores(
    predictions: np.ndarray,
    targets: np.ndarray,
    thresholds: float | np.ndarray = 0.5,
    *,
    from_logits: bool = False,
    pos_weight: float | np.ndarray | None = None,
    label_smoothing: float = 0.0,
    tuned_thresholds: np.ndarray | str | None = None,
    tuned_decisions: np.ndarray | None = None,
) -> dict[str, float | None]:
    """DECISION_METRICS at `thresholds` and RANKING_METRICS; optionally `loss` and `tuned_*`.

    `predictions` (rows, labels): probabilities, or logits with `from_logits`; `targets` (rows, labels) of 0
    and 1; `thresholds`: one number or (labels,).

    `loss`, only with `from_logits`: `binary_cross_entropy` with `pos_weight`; targets 0 and 1 become s/2 and
    1 - s/2 for a `label_smoothing` of s. `tuned_*`: DECISION_METRICS of `tuned_decisions` (rows, labels), or
    at `tuned_thresholds` (labels,); "tune" tunes these on the same rows, which is optimistic.

    Raises ValueError for different shapes, probabilities outside [0, 1], logits that are not finite and
    targets other than 0 and 1.
    """
    scores: dict[str, float | None] = {}
    if from_logits:
        soft = np.asarray(targets, dtype=np.float64) * (1 - label_smoothing) + label_smoothing / 2
        scores["loss"] = binary_cross_entropy(predictions, soft, pos_weight)
        predictions = sigmoid(predictions)
    scores |= decision_scores(predictions, targets, thresholds) | ranking_scores(predictions, targets)
    if tuned_thresholds is not None:
        if isinstance(tuned_thresholds, str):
            tuned_thresholds = tune_thresholds(predictions, targets)
        tuned_decisions = decide(predictions, tuned_thresholds)
    if tuned_decisions is not None:
        tuned = _scores_of(tuned_decisions, np.asarray(targets).astype(bool))
        scores |= {f"tuned_{name}": score for name, score in tuned.items()}
    return scores


def decision_scores(
    probabilities: np.ndarray, targets: np.ndarray, thresholds: float | np.ndarray = 0.5
) -> dict[str, float | None]:
    """DECISION_METRICS of probabilities. Shapes and errors as in `multilabel_scores`."""
    probabilities, targets = checked_matrices(probabilities, targets)
    return _scores_of(decide(probabilities, thresholds), targets)


def _scores_of(predicted: np.ndarray, targets: np.ndarray) -> dict[str, float | None]:
    if not targets.size:
        return dict.fromkeys(DECISION_METRICS)
    precision, recall, f1 = _precision_recall_f1(predicted, targets, axis=0)
    precision_micro, recall_micro, f1_micro = _precision_recall_f1(predicted, targets, axis=None)
    wrong = predicted != targets
    scores = {
        "f1_micro": f1_micro,
        "f1_macro": f1.mean(),
        "f1_samples": _precision_recall_f1(predicted, targets, axis=1)[2].mean(),
        "precision_micro": precision_micro,
        "recall_micro": recall_micro,
        "precision_macro": precision.mean(),
        "recall_macro": recall.mean(),
        "hamming_loss": wrong.mean(),
        "subset_accuracy": 1 - wrong.any(axis=1).mean(),
    }
    return {name: float(score) for name, score in scores.items()}


def ranking_scores(probabilities: np.ndarray, targets: np.ndarray) -> dict[str, float | None]:
    """RANKING_METRICS of probabilities, which need no thresholds. Shapes and errors as in
    `multilabel_scores`."""
    probabilities, targets = checked_matrices(probabilities, targets)
    if not targets.size:
        return dict.fromkeys(RANKING_METRICS)
    from sklearn.metrics import label_ranking_average_precision_score

    roc_auc, average_precision = _ranking_by_label(probabilities, targets)
    return {
        **_mean_of_defined("roc_auc_macro", roc_auc),
        **_mean_of_defined("average_precision_macro", average_precision),
        "lrap": float(label_ranking_average_precision_score(targets, probabilities)),
    }


def per_label_table(
    probabilities: np.ndarray,
    targets: np.ndarray,
    thresholds: float | np.ndarray,
    names: Sequence[str],
    decisions: np.ndarray | None = None,
) -> list[dict[str, str | int | float | None]]:
    """One row per label: label, support (positive rows), threshold, precision, recall, f1, roc_auc,
    average_precision. `decisions` (rows, labels) of bool: scored instead of the decisions at the thresholds.

    The mean of a column over its defined entries is the macro metric. Without rows every metric is None.
    Raises ValueError as `multilabel_scores` does, and if `names` are not one per label.
    """
    probabilities, targets = checked_matrices(probabilities, targets)
    if len(names) != targets.shape[1]:
        raise ValueError(f"{len(names)} label names for {targets.shape[1]} labels")
    columns = {
        "label": list(names),
        "support": targets.sum(axis=0).tolist(),
        "threshold": np.broadcast_to(np.asarray(thresholds, dtype=np.float64), len(names)).tolist(),
    }
    decisions = decide(probabilities, thresholds) if decisions is None else decisions
    metrics = _precision_recall_f1(decisions, targets, axis=0)
    metrics += _ranking_by_label(probabilities, targets)
    for name, scores in zip(
        ("precision", "recall", "f1", "roc_auc", "average_precision"), metrics, strict=True
    ):
        columns[name] = [None if np.isnan(score) or not len(targets) else score for score in scores.tolist()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def calibration_bins(
    probabilities: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(number of cells, mean probability, share of positives), (CALIBRATION_BINS,) each, in bins of equal
    width over all rows and labels; 0 in empty bins. Shapes and errors as in `multilabel_scores`."""
    probabilities, targets = (matrix.ravel() for matrix in checked_matrices(probabilities, targets))
    bins = np.minimum((probabilities * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    sizes = np.bincount(bins, minlength=CALIBRATION_BINS)
    sums = (np.bincount(bins, weights, minlength=CALIBRATION_BINS) for weights in (probabilities, targets))
    return sizes, *(total / np.maximum(sizes, 1) for total in sums)


def expected_calibration_error(probabilities: np.ndarray, targets: np.ndarray) -> float | None:
    """The mean difference of probability and share of positives over `calibration_bins`, weighted by size
    (Guo et al., arXiv:1706.04599, equation 3, over all labels instead of the top one); None without cells."""
    sizes, mean, share = calibration_bins(probabilities, targets)
    return float((np.abs(mean - share) * sizes).sum() / sizes.sum()) if sizes.sum() else None


def binary_cross_entropy(
    logits: np.ndarray, targets: np.ndarray, pos_weight: float | np.ndarray | None = None
) -> float | None:
    """Mean binary cross-entropy over all rows and labels, in nats, computed in float64; None without
    elements.

    `logits` and `targets` (rows, labels), targets in [0, 1]; `pos_weight`: one number or (labels,). As
    torch's BCEWithLogitsLoss: `pos_weight * y * softplus(-x) + (1 - y) * softplus(x)`; `logaddexp(0, x)` is
    softplus without overflow. Raises ValueError for different shapes and for logits that are not finite.
    """
    logits, targets = np.asarray(logits, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    if logits.shape != targets.shape:
        raise ValueError(
            f"logits {logits.shape} and targets {targets.shape} must have one shape (rows, labels)"
        )
    if not np.isfinite(logits).all():
        raise ValueError("logits hold NaN or infinity: the model diverged")
    if not logits.size:
        return None
    weight = 1.0 if pos_weight is None else np.asarray(pos_weight, dtype=np.float64)
    return float(
        np.mean(weight * targets * np.logaddexp(0, -logits) + (1 - targets) * np.logaddexp(0, logits))
    )


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The logistic function, in float64, without overflow."""
    return np.exp(-np.logaddexp(0, -np.asarray(logits, dtype=np.float64)))


def _precision_recall_f1(
    predicted: np.ndarray, targets: np.ndarray, axis: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Precision, recall and F1 of bool matrices, counted along `axis` (None: over all cells); 0 where
    undefined."""
    true_positive = (predicted & targets).sum(axis=axis)
    n_predicted, n_positive = predicted.sum(axis=axis), targets.sum(axis=axis)
    # The numerator is 0 wherever the denominator is, so a denominator of 1 gives the conventional 0.
    return (
        true_positive / np.maximum(n_predicted, 1),
        true_positive / np.maximum(n_positive, 1),
        2 * true_positive / np.maximum(n_predicted + n_positive, 1),
    )


def _ranking_by_label(probabilities: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(labels,) ROC AUC and average precision; NaN where undefined."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    roc_auc, average_precision = np.full((2, targets.shape[1]), np.nan)
    positive = targets.sum(axis=0)
    for label in np.flatnonzero(positive):
        truth, chances = targets[:, label], probabilities[:, label]
        average_precision[label] = average_precision_score(truth, chances)
        if positive[label] < len(targets):
            roc_auc[label] = roc_auc_score(truth, chances)
    return roc_auc, average_precision


def _mean_of_defined(name: str, scores: np.ndarray) -> dict[str, float | None]:
    defined = scores[~np.isnan(scores)]
    return {name: float(defined.mean()) if len(defined) else None, f"{name}_labels": len(defined)}
