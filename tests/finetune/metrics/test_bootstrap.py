import numpy as np
import pytest

from finetune.metrics import bootstrap
from finetune.metrics.bootstrap import bootstrap_interval, paired_bootstrap


def test_interval_has_the_width_that_theory_gives():
    """For many rows the bootstrap's interval is mean -+ 1.96 standard errors."""
    rows = np.random.default_rng(0).random((400, 2))
    low, high = np.array(bootstrap_interval(rows, 4000, seed=0))
    error = rows.std(axis=0) / np.sqrt(400)
    assert low == pytest.approx(rows.mean(axis=0) - 1.96 * error, abs=0.1 * error.max())
    assert high == pytest.approx(rows.mean(axis=0) + 1.96 * error, abs=0.1 * error.max())


def test_interval_does_not_depend_on_how_resamples_are_blocked(monkeypatch):
    rows = np.random.default_rng(0).random((7, 3))
    whole = bootstrap_interval(rows, 50, seed=3)
    monkeypatch.setattr(bootstrap, "CELLS_PER_BLOCK", 21)
    assert bootstrap_interval(rows, 50, seed=3) == whole


def test_a_difference_that_may_be_chance_has_a_large_p_and_an_interval_with_zero():
    rng = np.random.default_rng(0)
    ours, theirs = rng.random(500), rng.random(500)
    mean, low, high, p = paired_bootstrap(ours, theirs, 1000)
    assert mean == pytest.approx(ours.mean() - theirs.mean())
    assert low < 0 < high
    assert p > 0.05
    # The mean of differences of a normal distribution: its interval is known.
    apart = rng.normal(0.5, 1, 400)
    mean, low, high, p = paired_bootstrap(apart, np.zeros(400), 4000)
    assert (high - low) / 2 == pytest.approx(1.96 * apart.std() / 20, rel=0.1)
    assert p < 0.001
