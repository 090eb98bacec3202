"""Bootstrap over the rows of a file: confidence intervals of its metrics, and paired differences between two
runs.

Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 13 and 16; Koehn, "Statistical
Significance Tests for Machine Translation Evaluation", EMNLP 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

INTERVAL = (2.5, 97.5)  # percentiles
SEED = 0
RESAMPLES, FEWEST = 1000, 100
MAX_ELEMENTS = 2**27  # computed for a file altogether; large files get fewer resamples

MetricsOfRows = Callable[
    [np.ndarray], Mapping[str, float | None]
]  # row numbers, which may repeat -> metrics by name


def bootstrap(
    metrics: MetricsOfRows, rows: int, elements: int = 0, resamples: int = RESAMPLES, seed: int = SEED
) -> dict[str, np.ndarray]:
    """(1 + resamples,) values of each metric: of the file, then of as many rows drawn from it with
    replacement; NaN where a metric is undefined.

    The draws depend on `rows` and `seed` alone, so the values of two runs over the same rows are paired.
    `elements`: of the predictions of all rows; the more there are, the fewer resamples are drawn, at least
    FEWEST.
    """
    if elements:
        resamples = int(np.clip(MAX_ELEMENTS // elements, FEWEST, resamples))
    rng = np.random.default_rng(seed)
    drawn = [metrics(np.arange(rows)), *(metrics(rng.integers(rows, size=rows)) for _ in range(resamples))]
    return {name: np.array([values[name] for values in drawn], dtype=np.float64) for name in drawn[0]}


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % percentile interval of a metric's values from `bootstrap`; NaN if no resample has one."""
    known = values[1:][~np.isnan(values[1:])]
    low, high = np.percentile(known, INTERVAL) if len(known) else (np.nan, np.nan)
    return float(low), float(high)


def paired_difference(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float, float]:
    """(difference, its 95 % interval's two ends, two-sided p value) of a metric's values from `bootstrap` for
    two runs."""
    shorter = min(len(ours), len(theirs))
    differences = ours[:shorter] - theirs[:shorter]
    known = differences[1:][~np.isnan(differences[1:])]
    # The smallest p that so many resamples can show is not 0.
    below, above = ((known <= 0).sum() + 1) / (len(known) + 1), ((known >= 0).sum() + 1) / (len(known) + 1)
    return float(differences[0]), *interval(differences), float(min(1.0, 2 * min(below, above)))


class MeansOfRows:
    """The means of scores that each row has by itself. `scores`: (rows,) by name."""

    def __init__(self, scores: Mapping[str, np.ndarray]) -> None:
        self._names, self._scores = list(scores), np.stack([*scores.values()], axis=1, dtype=np.float64)

    def __call__(self, rows: np.ndarray) -> dict[str, float]:
        return dict(zip(self._names, self._scores[rows].mean(axis=0).tolist(), strict=True))
