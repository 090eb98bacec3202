"""From probabilities to decisions: the one prediction rule, and per-label thresholds tuned for F1 or another objective."""

from dataclasses import dataclass

import numpy as np

FALLBACK_BOUNDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
FOLDS = 5  # of rows, for thresholds that have not seen the rows which they decide
CELLS_PER_BLOCK = 1 << 18  # scores worked on at once: fits the processor's cache and bounds the memory


@dataclass(frozen=True)
class Objective:
    """What thresholds are chosen for: "f1"; "precision_at_recall", the highest precision with a recall of at least `target`;
    "recall_at_precision", the reverse; "cost", the least number of labels wrongly given plus `miss_cost` times that of labels
    missed."""

    name: str = "f1"
    target: float = 0.0
    miss_cost: float = 1.0

    def values(
        self, hits: np.ndarray, predicted: np.ndarray, positive: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | float]:
        """(m, k) how good cuts are, minus infinity for those that are ruled out; (m, k) what decides between equals; (m, 1) the
        value of predicting nothing. `hits` (m, k) of `predicted` (k,), out of `positive` (m, 1)."""
        if self.name == "f1":
            # One rounded division of exact integers: equal fractions are equal floats, so ties are seen as ties.
            return 2 * hits / (predicted + positive), np.zeros(hits.shape), -1.0
        if self.name == "cost":
            return -(predicted - hits + self.miss_cost * (positive - hits)), np.zeros(hits.shape), -self.miss_cost * positive
        precision, recall = hits / predicted, hits / positive
        if self.name == "precision_at_recall":
            return np.where(recall >= self.target, precision, -np.inf), recall, -1.0
        return np.where(precision >= self.target, recall, -np.inf), precision, 0.0


F1 = Objective()


def folds_of(rows: int, seed: int) -> list[np.ndarray]:
    """Masks (rows,) of at most `FOLDS` parts of the rows, drawn by `seed`, each row in one."""
    fold = np.empty(rows, dtype=int)
    fold[np.random.default_rng(seed).permutation(rows)] = np.arange(rows) % FOLDS
    return [fold == number for number in range(min(FOLDS, rows))]


def checked_matrices(probabilities: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities as float64 and targets as bool, both (rows, labels), or a ValueError that says what is wrong.

    Logits, percentages and NaN are refused: each of them would give scores that look right.
    """
    probabilities, targets = np.asarray(probabilities, dtype=np.float64), np.asarray(targets)
    if probabilities.ndim != 2 or probabilities.shape != targets.shape:
        raise ValueError(f"probabilities {probabilities.shape} and targets {targets.shape} must have one shape (rows, labels)")
    # NaN compares as false, so it is refused too.
    for row, label in np.argwhere(~((probabilities >= 0) & (probabilities <= 1)))[:1]:
        raise ValueError(
            f"probability {probabilities[row, label]} at row {row}, label {label} is not between 0 and 1; NaN means that the "
            "model diverged, other values that a sigmoid is missing"
        )
    for row, label in np.argwhere((targets != 0) & (targets != 1))[:1]:
        raise ValueError(f"target {targets[row, label]} at row {row}, label {label} is neither 0 nor 1")
    return probabilities, targets.astype(bool)


def decide(probabilities: np.ndarray, thresholds: float | np.ndarray) -> np.ndarray:
    """The labels of each row, bool (rows, labels): those with `probability >= threshold`.

    `thresholds` is one number or one per label (labels,). The comparison is made in float64, so float32 probabilities
    get the same decisions whether thresholds come as an array or as Python floats. Raises ValueError for thresholds of
    another shape.
    """
    probabilities, thresholds = np.asarray(probabilities, dtype=np.float64), np.asarray(thresholds, dtype=np.float64)
    if thresholds.shape not in ((), probabilities.shape[1:]):
        raise ValueError(f"thresholds {thresholds.shape} must be one number or one per label {probabilities.shape[1:]}")
    return probabilities >= thresholds


def tune_thresholds(probabilities: np.ndarray, targets: np.ndarray, objective: Objective = F1) -> np.ndarray:
    """Per label, a threshold for the objective; for F1 one that does not trust labels whose scores say little.

    `probabilities` (rows, labels) in [0, 1], `targets` (rows, labels) of 0 and 1 -> float64 (labels,).

    SCutFBR.1 (Yang, "A study of thresholding strategies for text categorization", SIGIR 2001; as in Lewis et al., RCV1, JMLR
    2004): each label takes its threshold of best F1 (`best_f1_thresholds`), but one whose F1 stays below a bound takes the
    threshold that only its highest score reaches. The threshold of best F1 of a label with a handful of positives is often
    so low that it would give the label to many rows and cost more than the label can gain. The bound, one of FALLBACK_BOUNDS,
    is the one with the best micro-F1 on these rows (of equals the lowest), so that hard tasks, on which no label reaches a high
    F1, keep their thresholds. Labels without positives fall back too; where no row has any label all stay at 0.5.

    F1 on the very rows that chose the thresholds is optimistic: it also rewards how these rows happened to fall, the more the
    fewer positives a label has. Judge the thresholds on rows that they have not seen (`folds_of`).

    Raises ValueError for matrices of different shapes, probabilities outside [0, 1] and targets other than 0 and 1.
    """
    probabilities, targets = checked_matrices(probabilities, targets)
    tuned = best_thresholds(probabilities, targets, objective)
    if objective.name != "f1" or not targets.any():
        return tuned
    careful = _top_cuts(probabilities)
    support = targets.sum(axis=0)
    counts, careful_counts = (
        _hits_and_predicted(probabilities, targets, tuned),
        _hits_and_predicted(probabilities, targets, careful),
    )
    f1 = _f1(*counts, support)
    best, chosen = -1.0, tuned
    for bound in FALLBACK_BOUNDS:
        falls_back = (f1 < bound) | (support == 0)
        hits, predicted = (np.where(falls_back, low, high).sum() for low, high in zip(careful_counts, counts, strict=True))
        micro = _f1(hits, predicted, support.sum())
        if micro > best:
            best, chosen = micro, np.where(falls_back, careful, tuned)
    return chosen


def best_thresholds(probabilities: np.ndarray, targets: np.ndarray, objective: Objective = F1) -> np.ndarray:
    """Per label, the threshold whose decisions are best on these rows; shapes and errors as `tune_thresholds`.

    A threshold lies midway between two adjacent distinct scores (below the lowest score: midway to 0), so that the
    decisions survive round-off in the scores. Of several thresholds as good the one nearest 0.5 is taken, of two equally
    near the higher one. Where predicting nothing is best, or no threshold has the precision that is asked for, it lies midway
    between the highest score and 1. A label without positives or without negatives says nothing about its threshold and
    keeps 0.5.
    """
    probabilities, targets = checked_matrices(probabilities, targets)
    tuned = np.full(probabilities.shape[1], 0.5)
    support = targets.sum(axis=0)
    informative = np.flatnonzero((support > 0) & (support < len(targets)))
    labels_per_block = max(1, CELLS_PER_BLOCK // max(1, len(targets)))
    for start in range(0, len(informative), labels_per_block):
        block = informative[start : start + labels_per_block]
        # One label per row, because sorting contiguous memory is several times faster.
        tuned[block] = _best_cuts(np.ascontiguousarray(probabilities[:, block].T), targets[:, block].T, objective)
    return tuned


def _top_cuts(probabilities: np.ndarray) -> np.ndarray:
    """(labels,) midway between the two highest distinct scores of each label; 0.5 where all scores are one."""
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
    """The best threshold (m,) of each row of `scores` (m, k) against `truth` (m, k), which holds both classes."""
    positive = truth.sum(axis=1, keepdims=True)
    order = np.argsort(-scores, axis=1)
    scores = np.take_along_axis(scores, order, axis=1)
    hits = np.cumsum(np.take_along_axis(truth, order, axis=1), axis=1)
    # When the best 1, 2, ... are predicted.
    values, seconds, of_nothing = objective.values(hits, np.arange(1, scores.shape[1] + 1), positive)
    values[:, :-1][scores[:, :-1] == scores[:, 1:]] = -np.inf  # no threshold separates equal scores

    below = np.concatenate([scores[:, 1:], np.zeros((len(scores), 1))], axis=1)
    cuts = (scores + below) / 2
    cuts = np.where(cuts > below, cuts, scores)  # neighbouring floats have nothing between them
    highest = values.max(axis=1, keepdims=True)
    seconds = np.where(values == highest, seconds, -np.inf)
    distance = np.where(seconds == seconds.max(axis=1, keepdims=True), np.abs(cuts - 0.5), np.inf)
    chosen = cuts[np.arange(len(cuts)), distance.argmin(axis=1)]
    top = scores[:, 0]
    nothing = np.maximum((1 + top) / 2, np.nextafter(top, 2))
    return np.where((of_nothing > highest)[:, 0], nothing, chosen)
