"""Bootstrap confidence intervals of means over rows, and a paired bootstrap test."""

import numpy as np

INTERVAL = (2.5, 97.5)  # percentiles
CELLS_PER_BLOCK = 1 << 22  # drawn at once; bounds the memory


def bootstrap_interval(rows: np.ndarray, resamples: int, seed: int) -> list[list[float]]:
    """[2.5th percentiles, 97.5th percentiles] of the mean of each column of `rows` (rows, columns).

    The percentile bootstrap of Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13."""
    return np.percentile(_resampled_means(rows, resamples, seed), INTERVAL, axis=0).tolist()


def paired_bootstrap(ours: np.ndarray, theirs: np.ndarray, resamples: int) -> tuple[float, float, float, float]:
    """(difference of the means, its 2.5th percentile, its 97.5th percentile, two-sided p value). `ours`, `theirs`: (rows,)
    scores of the same rows.

    Efron and Tibshirani, chapter 16; Koehn, "Statistical Significance Tests for Machine Translation Evaluation", 2004."""
    difference = np.asarray(ours, float) - theirs
    means = _resampled_means(difference[:, None], resamples, 0)[:, 0]
    # Adding 1 avoids p = 0, which a finite number of resamples cannot show.
    below, above = ((means <= 0).sum() + 1) / (resamples + 1), ((means >= 0).sum() + 1) / (resamples + 1)
    return float(difference.mean()), *np.percentile(means, INTERVAL).tolist(), float(min(1.0, 2 * min(below, above)))


def _resampled_means(rows: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """(resamples, columns) means of rows drawn with replacement."""
    rng = np.random.default_rng(seed)
    n_rows, n_columns = rows.shape
    means = np.empty((resamples, n_columns))
    block = max(1, CELLS_PER_BLOCK // n_rows)
    for start in range(0, resamples, block):
        drawn = rng.integers(n_rows, size=(min(block, resamples - start), n_rows))
        for column in range(n_columns):
            means[start : start + len(drawn), column] = rows[:, column].take(drawn).mean(axis=1)
    return means
