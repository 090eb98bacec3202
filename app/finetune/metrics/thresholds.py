"""From probabilities to decisions: the one prediction rule, and per-label thresholds tuned for F1."""

import numpy as np

FALLBACK_BOUNDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CELLS_PER_BLOCK = 1 << 18  # scores worked on at once: fits the processor's cache and bounds the memory


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


def tune_thresholds(probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Per label, a threshold for F1 that does not trust labels whose scores say little.

    `probabilities` (rows, labels) in [0, 1], `targets` (rows, labels) of 0 and 1 -> float64 (labels,).

    SCutFBR.1 (Yang, "A study of thresholding strategies for text categorization", SIGIR 2001; as in Lewis et al., RCV1, JMLR
    2004): each label takes its threshold of best F1 (`best_f1_thresholds`), but one whose F1 stays below a bound takes the
    threshold that only its highest score reaches. The threshold of best F1 of a label with a handful of positives is often
    so low that it would give the label to many rows and cost more than the label can gain. The bound, one of FALLBACK_BOUNDS,
    is the one with the best micro-F1 on these rows (of equals the lowest), so that hard tasks, on which no label reaches a high
    F1, keep their thresholds. Labels without positives fall back too; where no row has any label all stay at 0.5.

    F1 on the very rows that chose the thresholds is optimistic: it also rewards how these rows happened to fall, the more the
    fewer positives a label has. Judge the thresholds on rows that they have not seen.

    Raises ValueError for matrices of different shapes, probabilities outside [0, 1] and targets other than 0 and 1.
    """
    probabilities, targets = checked_matrices(probabilities, targets)
    tuned = best_f1_thresholds(probabilities, targets)
    if not targets.any():
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


def best_f1_thresholds(probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Per label, the threshold whose decisions have the highest F1 on these rows; shapes and errors as `tune_thresholds`.

    A threshold lies midway between two adjacent distinct scores (below the lowest score: midway to 0), so that the
    decisions survive round-off in the scores. Of several thresholds with the same F1 the one nearest 0.5 is taken, of
    two equally near the higher one. A label without positives or without negatives says nothing about its threshold and
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
        tuned[block] = _best_cuts(np.ascontiguousarray(probabilities[:, block].T), targets[:, block].T)
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


def _best_cuts(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The best threshold (m,) of each row of `scores` (m, k) against `truth` (m, k), which holds both classes."""
    positive = truth.sum(axis=1, keepdims=True)
    order = np.argsort(-scores, axis=1)
    scores = np.take_along_axis(scores, order, axis=1)
    hits = np.cumsum(np.take_along_axis(truth, order, axis=1), axis=1)
    # F1 = 2 TP / (predicted + positive), when the best 1, 2, ... are predicted. One rounded division of exact integers:
    # equal fractions are equal floats, so ties are seen as ties.
    f1 = 2 * hits / (np.arange(1, scores.shape[1] + 1) + positive)
    f1[:, :-1][scores[:, :-1] == scores[:, 1:]] = -1  # no threshold separates equal scores

    below = np.concatenate([scores[:, 1:], np.zeros((len(scores), 1))], axis=1)
    cuts = (scores + below) / 2
    cuts = np.where(cuts > below, cuts, scores)  # neighbouring floats have nothing between them
    distance = np.where(f1 == f1.max(axis=1, keepdims=True), np.abs(cuts - 0.5), np.inf)
    return cuts[np.arange(len(cuts)), distance.argmin(axis=1)]
