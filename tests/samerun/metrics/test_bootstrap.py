import numpy as np
import pytest

from samerun.metrics import bootstrap
from samerun.metrics.bootstrap import MeansOfRows, interval, paired_difference


def resampled(scores, resamples=4000):
    return bootstrap.bootstrap(MeansOfRows({"score": scores}), len(scores), resamples=resamples)["score"]


def test_an_interval_has_the_width_that_theory_gives():
    """For many rows the bootstrap's interval is mean -+ 1.96 standard errors."""
    scores = np.random.default_rng(0).random(400)
    values, error = resampled(scores), scores.std() / np.sqrt(400)
    assert values[0] == pytest.approx(scores.mean())
    assert interval(values) == pytest.approx(
        (scores.mean() - 1.96 * error, scores.mean() + 1.96 * error), abs=0.1 * error
    )


def test_large_files_get_fewer_resamples_which_are_those_of_small_ones():
    metrics = MeansOfRows({"score": np.random.default_rng(0).random(50)})
    few = bootstrap.bootstrap(metrics, 50, elements=bootstrap.MAX_ELEMENTS)["score"]
    assert len(few) == 1 + bootstrap.FEWEST
    assert few.tolist() == bootstrap.bootstrap(metrics, 50)["score"][: len(few)].tolist()


def test_undefined_values_are_left_out():
    values = np.array([np.nan, 0.5, np.nan, 0.5])
    assert interval(values) == (0.5, 0.5)
    assert np.isnan(interval(np.full(3, np.nan))).all()
    assert paired_difference(values, np.zeros(9))[1:] == (0.5, 0.5, 2 * 1 / 3)


def test_a_difference_that_may_be_chance_has_a_large_p_and_an_interval_with_zero():
    rng = np.random.default_rng(0)
    ours, theirs = rng.random(500), rng.random(500)
    difference, low, high, p = paired_difference(resampled(ours, 1000), resampled(theirs, 1000))
    assert difference == pytest.approx(ours.mean() - theirs.mean())
    assert low < 0 < high
    assert p > 0.05
    # The mean of differences of a normal distribution: its interval is known.
    apart = rng.normal(0.5, 1, 400)
    difference, low, high, p = paired_difference(resampled(apart), resampled(np.zeros(400)))
    assert (high - low) / 2 == pytest.approx(1.96 * apart.std() / 20, rel=0.1)
    assert p < 0.001
