"""From probabilities to decisions: the prediction rule, and per-label thresholds tuned for F1 or another
objective."""

from dataclasses import dataclass

import numpy as np

FALLBACK_BOUNDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
FOLDS = 5  # of the cross-validation of thresholds
CELLS_PER_BLOCK = 1 << 18  # scores processed at once: fits the processor's cache and bounds the memory


@dataclass(frozen=True)
class Objective:
    """The objective of threshold tuning: "f1"; "precision_at_recall", the highest precision with a recall of
    at least `target`; "recall_at_precision", the reverse; "cost", the lowest (false positives + `miss_cost` *
    false negatives)."""

    name: str = "f1"
    target: float = 0.0
    miss_cost: float = 1.0

    def values(
        self, hits: np.ndarray, predicted: np.ndarray, positive: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | float]:
        """Returns (value of each cut (m, k), tie-breaker (m, k), value of predicting nothing (m, 1)). Higher
        is better; cuts that miss the target are minus infinity.

        For each of m labels and k cuts: `hits` (m, k) true positives, `predicted` (k,) predicted rows,
        `positive` (m, 1) positive rows.
        """
        if self.name == "f1":
            # A single division of integers, so equal fractions are equal floats and ties are recognized.
            return 2 * hits / (predicted + positive), np.zeros(hits.shape), -1.0
        if self.name == "cost":
            return (
                -(predicted - hits + self.miss_cost * (positive - hits)),
                np.zeros(hits.shape),
                -self.miss_cost * positive,
            )
        precision, recall = hits / predicted, hits / positive
        if self.name == "precision_at_recall":
            return np.where(recall >= self.target, precision, -np.inf), recall, -1.0
        return np.where(precision >= self.target, recall, -np.inf), precision, 0.0


F1 = Objective()


def folds_of(rows: int, seed: int) -> list[np.ndarray]:
    """Boolean masks (rows,) of at most `FOLDS` random folds."""
    fold = np.empty(rows, dtype=int)
    fold[np.random.default_rng(seed).permutation(rows)] = np.arange(rows) % FOLDS
    return [fold == number for number in range(min(FOLDS, rows))]


def checked_matrices(probabilities: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(probabilities as float64, targets as bool), both (rows, labels).

    Raises ValueError for different shapes, other targets than 0 and 1, and values outside [0, 1]: logits,
    percentages and NaN would give plausible but wrong scores.
    """
    probabilities, targets = np.asarray(probabilities, dtype=np.float64), np.asarray(targets)
    if probabilities.ndim != 2 or probabilities.shape != targets.shape:
        raise ValueError(
            f"probabilities {probabilities.shape} and targets {targets.shape} must have one shape "
            "(rows, labels)"
        )
    # The condition is false for NaN, too.
    for row, label in np.argwhere(~((probabilities >= 0) & (probabilities <= 1)))[:1]:
        raise ValueError(
            f"probability {probabilities[row, label]} at row {row}, label {label} is not between 0 "
            "and 1; NaN means that the "
            "model diverged, other values that a sigmoid is missing"
        )
    for row, label in np.argwhere((targets != 0) & (targets != 1))[:1]:
        raise ValueError(f"target {targets[row, label]} at row {row}, label {label} is neither 0 nor 1")
    return probabilities, targets.astype(bool)


def decide(probabilities: np.ndarray, thresholds: float | np.ndarray) -> np.ndarray:
    """bool (rows, labels): `probability >= threshold`, compared in float64.

    `thresholds`: one number or (labels,). Raises ValueError for thresholds of another shape.
    """
    probabilities, thresholds = (
        np.asarray(probabilities, dtype=np.float64),
        np.asarray(thresholds, dtype=np.float64),
    )
    if thresholds.shape not in ((), probabilities.shape[1:]):
        raise ValueError(
            f"thresholds {thresholds.shape} must be one number or one per label {probabilities.shape[1:]}"
        )
    return probabilities >= thresholds


def tune_thresholds(probabilities: np.ndarray, targets: np.ndarray, objective: Objective = F1) -> np.ndarray:
    """(labels,) float64 thresholds for the objective. `probabilities`: (rows, labels) in [0, 1]; `targets`:
    (rows, labels) of 0 and 1.

    For F1 this is SCutFBR.1 (Yang, "A study of thresholding strategies for text categorization", SIGIR 2001;
    as in Lewis et al., RCV1, JMLR 2004). Each label takes its threshold of best F1. A label whose F1 stays
    below a bound falls back to a threshold that only its highest score reaches: with few positives the
    threshold of best F1 is often so low that it causes many false positives. The bound is the one in
    FALLBACK_BOUNDS with the best micro-F1 on these rows, the lowest of equals. Labels without positives fall
    back, too; without any positive all thresholds are 0.5.

    F1 on the rows that tuned the thresholds is optimistic, the more the fewer positives a label has. Evaluate
    thresholds on other rows (`folds_of`).

    Raises ValueError for different shapes, probabilities outside [0, 1] and targets other than 0 and 1.
    """
    probabilities, targets = checked_matrices(probabilities, targets)
    tuned = best_thresholds(probabilities, targets, objective)
    if objective.name != "f1" or not targets.any():
        return tuned
    fallback = _top_cuts(probabilities)
    support = targets.sum(axis=0)
    tuned_counts = _hits_and_predicted(probabilities, targets, tuned)
    fallback_counts = _hits_and_predicted(probabilities, targets, fallback)
    f1 = _f1(*tuned_counts, support)
    best_f1, best = -1.0, tuned
    for bound in FALLBACK_BOUNDS:
        falls_back = (f1 < bound) | (support == 0)
        hits, predicted = (
            np.where(falls_back, a, b).sum() for a, b in zip(fallback_counts, tuned_counts, strict=True)
        )
        micro_f1 = _f1(hits, predicted, support.sum())
        if micro_f1 > best_f1:
            best_f1, best = micro_f1, np.where(falls_back, fallback, tuned)
    return best


def best_thresholds(probabilities: np.ndarray, targets: np.ndarray, objective: Objective = F1) -> np.ndarray:
    """(labels,) the best thresholds on these rows; shapes and errors as in `tune_thresholds`.

    A threshold lies midway between two adjacent distinct scores (below the lowest score: midway to 0), so
    that round-off does not change decisions. Ties go to the threshold nearest 0.5, then to the higher one. If
    predicting nothing is best, or no threshold reaches the target, it lies midway between the highest score
    and 1. Labels without positives or negatives keep 0.5.
    """
    probabilities, targets = checked_matrices(probabilities, targets)
    tuned = np.full(probabilities.shape[1], 0.5)
    support = targets.sum(axis=0)
    informative = np.flatnonzero((support > 0) & (support < len(targets)))
    labels_per_block = max(1, CELLS_PER_BLOCK // max(1, len(targets)))
    for start in range(0, len(informative), labels_per_block):
        block = informative[start : start + labels_per_block]
        # Transposed, since sorting contiguous memory is several times faster.
        tuned[block] = _best_cuts(
            np.ascontiguousarray(probabilities[:, block].T), targets[:, block].T, objective
        )
    return tuned


def _top_cuts(probabilities: np.ndarray) -> np.ndarray:
    """(labels,) midway between the two highest distinct scores of each label; 0.5 if all scores are equal."""
    top = probabilities.max(axis=0)
    lower = np.where(probabilities < top, probabilities, -1).max(axis=0)
    cuts = (top + lower) / 2
    return np.where(lower < 0, 0.5, np.where(cuts > lower, cuts, top))


def _hits_and_predicted(
    probabilities: np.ndarray, targets: np.ndarray, thresholds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    decisions = decide(probabilities, thresholds)
    return (decisions & targets).sum(axis=0), decisions.sum(axis=0)


def _f1(hits: np.ndarray, predicted: np.ndarray, positive: np.ndarray) -> np.ndarray:
    return 2 * hits / np.maximum(predicted + positive, 1)


def _best_cuts(scores: np.ndarray, truth: np.ndarray, objective: Objective) -> np.ndarray:
    """(m,) the best thresholds for `scores` (m, k) and `truth` (m, k), of which every row has both
    classes."""
    positive = truth.sum(axis=1, keepdims=True)
    order = np.argsort(-scores, axis=1)
    scores = np.take_along_axis(scores, order, axis=1)
    hits = np.cumsum(np.take_along_axis(truth, order, axis=1), axis=1)
    # Column i: the i + 1 highest scores are predicted.
    values, tie_breaker, value_of_none = objective.values(hits, np.arange(1, scores.shape[1] + 1), positive)
    values[:, :-1][scores[:, :-1] == scores[:, 1:]] = -np.inf  # no threshold separates equal scores

    below = np.concatenate([scores[:, 1:], np.zeros((len(scores), 1))], axis=1)
    cuts = (scores + below) / 2
    cuts = np.where(cuts > below, cuts, scores)  # nothing lies between adjacent floats
    highest = values.max(axis=1, keepdims=True)
    tie_breaker = np.where(values == highest, tie_breaker, -np.inf)
    distance = np.where(tie_breaker == tie_breaker.max(axis=1, keepdims=True), np.abs(cuts - 0.5), np.inf)
    best = cuts[np.arange(len(cuts)), distance.argmin(axis=1)]
    top = scores[:, 0]
    above_all = np.maximum((1 + top) / 2, np.nextafter(top, 2))
    return np.where((value_of_none > highest)[:, 0], above_all, best)
