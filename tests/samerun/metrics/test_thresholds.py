import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import f1_score

from samerun.metrics.thresholds import (
    FALLBACK_BOUNDS,
    Objective,
    best_thresholds,
    decide,
    folds_of,
    tune_thresholds,
)


def column(values):
    return np.array(values).reshape(-1, 1)


def tuned(scores, truth):
    return tune_thresholds(column(scores), column(truth))[0]


def f1_per_label(probabilities, targets, thresholds):
    return f1_score(targets, probabilities >= thresholds, average=None, zero_division=0)


@st.composite
def rows(draw):
    n, labels = draw(st.integers(1, 12)), draw(st.integers(2, 4))
    # Few distinct values, so that ties and scores of exactly 0, 0.5 and 1 are common; and arbitrary floats.
    score = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), st.floats(0, 1))
    return draw(arrays(np.float64, (n, labels), elements=score)), draw(
        arrays(np.int64, (n, labels), elements=st.integers(0, 1))
    )


def exhaustive_best_f1(scores, truth):
    return max(f1_score(truth, scores >= cut, zero_division=0) for cut in np.unique(scores))


@settings(max_examples=60)
@given(rows())
def test_best_f1_is_the_best_there_is(data):
    probabilities, targets = data
    thresholds = best_thresholds(probabilities, targets)
    achieved = f1_per_label(probabilities, targets, thresholds)
    assert np.all(achieved >= f1_per_label(probabilities, targets, 0.5))
    for label in np.flatnonzero((targets.sum(axis=0) > 0) & (targets.sum(axis=0) < len(targets))):
        assert achieved[label] == exhaustive_best_f1(probabilities[:, label], targets[:, label])


@settings(max_examples=60)
@given(rows(), st.randoms(use_true_random=False))
def test_row_order_does_not_matter(data, random):
    probabilities, targets = data
    order = random.sample(range(len(targets)), len(targets))
    np.testing.assert_array_equal(
        tune_thresholds(probabilities, targets), tune_thresholds(probabilities[order], targets[order])
    )


def test_cut_lies_midway_between_the_scores_it_separates():
    assert tuned([0.1, 0.2, 0.6, 0.7], [0, 0, 1, 1]) == (0.2 + 0.6) / 2


def test_equal_f1_goes_to_the_threshold_nearest_one_half():
    # Cuts after row 1 and after row 4: F1 2*1/(1+2) = 2*2/(4+2) = 2/3, cuts 0.85 and 0.45.
    assert tuned([0.9, 0.8, 0.7, 0.5, 0.4], [1, 0, 0, 1, 0]) == 0.45
    # The mirror image in position: the cut after row 1 is now the nearer one.
    assert tuned([0.7, 0.5, 0.3, 0.2, 0.1], [1, 0, 0, 1, 0]) == 0.6
    # 0.75 and 0.25 are equally near.
    assert tuned([0.875, 0.625, 0.5, 0.375, 0.125], [1, 0, 0, 1, 0]) == 0.75


# The middle of two neighbouring floats rounds to the even mantissa: up for one of these, down for the other.
@pytest.mark.parametrize("low", [0.3, np.nextafter(0.3, 1)])
def test_adjacent_floats_are_still_separated(low):
    high = np.nextafter(low, 1)
    cut = tuned([low, high], [0, 1])
    assert decide(column([low, high]), cut).ravel().tolist() == [False, True]


def test_constant_scores_predict_every_row():
    assert tuned([0.2, 0.2, 0.2], [0, 1, 0]) == 0.1
    assert tuned([0.0, 0.0, 0.0], [0, 1, 0]) == 0.0


@pytest.mark.parametrize("truth", [[0, 0, 0], [1, 1, 1]])
def test_label_with_one_class_keeps_one_half(truth):
    assert tuned([0.1, 0.7, 0.9], truth) == 0.5


def test_no_rows_keep_one_half():
    np.testing.assert_array_equal(tune_thresholds(np.empty((0, 3)), np.empty((0, 3))), [0.5] * 3)


def test_labels_are_tuned_apart_even_over_several_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    probabilities, targets = rng.random((50, 9)), rng.random((50, 9)) < 0.3
    targets[:, 4] = False
    at_once = best_thresholds(probabilities, targets)
    monkeypatch.setattr("samerun.metrics.thresholds.CELLS_PER_BLOCK", 100)
    np.testing.assert_array_equal(best_thresholds(probabilities, targets), at_once)
    np.testing.assert_array_equal(
        at_once, [tuned(p, t) for p, t in zip(probabilities.T, targets.T, strict=True)]
    )


@settings(max_examples=60)
@given(rows())
def test_the_bound_is_the_one_of_best_micro_f1(data):
    probabilities, targets = data
    own = best_thresholds(probabilities, targets)
    f1, support = f1_per_label(probabilities, targets, own), targets.sum(axis=0)
    found = f1_score(
        targets, probabilities >= tune_thresholds(probabilities, targets), average="micro", zero_division=0
    )
    micro = []
    for bound in FALLBACK_BOUNDS:
        thresholds = own.copy()
        for label in np.flatnonzero((f1 < bound) | (support == 0)):
            distinct = np.unique(probabilities[:, label])
            thresholds[label] = distinct[-2:].mean() if len(distinct) > 1 else 0.5
            if len(distinct) > 1 and not thresholds[label] > distinct[-2]:
                thresholds[label] = distinct[-1]
        micro.append(f1_score(targets, probabilities >= thresholds, average="micro", zero_division=0))
    assert found == pytest.approx(max(micro) if targets.any() else 0)


def test_a_label_whose_scores_say_little_does_not_flood_the_rows():
    # The first label is told apart perfectly. The only positive of the second is its lowest score: its best
    # F1 would give the label to all ten rows.
    sure, noise = np.linspace(0.9, 0.1, 10), np.linspace(0.01, 0.001, 10)
    probabilities = np.stack([sure, noise], axis=1)
    targets = np.zeros((10, 2), dtype=int)
    targets[:5, 0] = targets[9, 1] = 1
    assert decide(probabilities, best_thresholds(probabilities, targets)).sum(axis=0).tolist() == [5, 10]
    assert decide(probabilities, tune_thresholds(probabilities, targets)).sum(axis=0).tolist() == [5, 1]


def test_labels_that_are_all_hard_keep_their_thresholds():
    rng = np.random.default_rng(1)
    targets = rng.random((400, 3)) < 0.2
    probabilities = np.clip(0.3 + 0.1 * targets + 0.2 * rng.standard_normal((400, 3)), 0, 1)
    assert f1_per_label(probabilities, targets, best_thresholds(probabilities, targets)).max() < 0.5
    np.testing.assert_array_equal(
        tune_thresholds(probabilities, targets), best_thresholds(probabilities, targets)
    )


def test_a_label_without_positives_is_given_only_above_what_others_scored():
    probabilities = np.array([[0.9, 0.04], [0.1, 0.02], [0.2, 0.01]])
    thresholds = tune_thresholds(probabilities, np.array([[1, 0], [0, 0], [0, 0]]))
    assert thresholds.tolist() == pytest.approx([0.55, 0.03])


def test_decide_includes_the_threshold_itself():
    probabilities = np.array([[0.5, 0.5], [0.49, 0.9]])
    assert decide(probabilities, 0.5).tolist() == [[True, True], [False, True]]
    assert decide(probabilities, [0.4, 0.6]).tolist() == [[True, False], [True, True]]


def test_float32_probabilities_meet_python_floats_in_float64():
    # float32(0.1) is 0.100000001..., which float32 arithmetic would call equal to 0.1 + 1e-10.
    assert not decide(np.array([[0.1]], dtype=np.float32), 0.1 + 2e-9).any()


@pytest.mark.parametrize("thresholds", [[0.5], [0.5, 0.5, 0.5], [[0.5, 0.5]]])
def test_thresholds_of_another_shape_are_refused(thresholds):
    with pytest.raises(ValueError, match="one per label"):
        decide(np.zeros((4, 2)), thresholds)


@pytest.mark.parametrize(
    ("probabilities", "targets", "message"),
    [
        ([[0.1, np.nan]], [[0, 1]], r"probability nan at row 0, label 1 .* diverged"),
        ([[0.1, 0.2], [3.0, 0.2]], [[0, 1], [0, 0]], r"probability 3.0 at row 1, label 0 .* sigmoid"),
        ([[0.1, 0.2]], [[0, -100]], r"target -100 at row 0, label 1"),
        ([[0.1, 0.2]], [[0, 1, 1]], r"\(1, 2\) and targets \(1, 3\)"),
        ([0.1, 0.2], [0, 1], r"\(2,\) and targets \(2,\)"),
    ],
)
def test_what_cannot_be_scored_is_refused(probabilities, targets, message):
    with pytest.raises(ValueError, match=message):
        tune_thresholds(np.array(probabilities), np.array(targets))


def exhaustive(objective, scores, truth):
    """The best value that any threshold has, predicting nothing among them."""
    values = []
    for cut in (*np.unique(scores), 2.0):
        decided = scores >= cut
        hits, predicted, positive = (decided & truth).sum(), decided.sum(), truth.sum()
        precision, recall = (hits / predicted if predicted else 1.0), hits / positive
        values.append(
            {
                "precision_at_recall": precision if recall >= objective.target else -1,
                "recall_at_precision": recall if precision >= objective.target else -1,
                "cost": -((predicted - hits) + objective.miss_cost * (positive - hits)),
            }[objective.name]
        )
    return max(values), values


OBJECTIVES = [
    Objective("precision_at_recall", 0.6),
    Objective("recall_at_precision", 0.6),
    Objective("cost", miss_cost=0.4),
    Objective("cost", miss_cost=5.0),
]


@settings(max_examples=60)
@given(rows(), st.sampled_from(OBJECTIVES))
def test_no_threshold_is_better_for_the_objective(data, objective):
    probabilities, targets = data[0], data[1].astype(bool)
    thresholds = best_thresholds(probabilities, targets, objective)
    for label in np.flatnonzero(targets.any(axis=0) & ~targets.all(axis=0)):
        scores, truth = probabilities[:, label], targets[:, label]
        best, values = exhaustive(objective, scores, truth)
        cuts = [*np.unique(scores), 2.0]
        chosen = next(
            number
            for number, cut in enumerate(cuts)
            if ((scores >= cut) == (scores >= thresholds[label])).all()
        )
        assert values[chosen] == best


def test_where_no_threshold_is_precise_enough_nothing_is_predicted():
    scores, truth = column([0.9, 0.5, 0.1, 0.3]), column([0, 0, 1, 1])
    assert best_thresholds(scores, truth, Objective("recall_at_precision", 0.9))[0] == pytest.approx(0.95)
    assert best_thresholds(column([1.0, 0.5]), column([0, 1]), Objective("cost", miss_cost=0.1))[0] > 1


def test_each_row_is_in_one_fold_and_folds_are_a_function_of_the_seed():
    for number in (1, 3, 12):
        folds = folds_of(number, 7)
        assert np.sum(folds, axis=0).tolist() == [1] * number
        assert {int(fold.sum()) for fold in folds} <= {number // 5, number // 5 + 1}
        np.testing.assert_array_equal(folds, folds_of(number, 7))
    assert folds_of(0, 7) == []
    assert not np.array_equal(folds_of(12, 7), folds_of(12, 8))
