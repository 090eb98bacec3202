import json
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize_scalar
from sklearn import metrics as reference
from sklearn.metrics import f1_score

from samerun.reports.figures import as_image
from samerun.reports.page import MAX_ROWS
from samerun.text import multi_label_scores
from samerun.text.losses import MultiLabelLoss
from samerun.text.multi_label_scores import (
    DECISION_METRICS,
    METRICS,
    TEMPERATURE_RANGE,
    Objective,
    Thresholds,
    ThresholdTuner,
    decision_scores,
    expected_calibration_error,
    figures,
    fit_temperatures,
    multilabel_scores,
    per_label_table,
    ranking_scores,
    report_content,
    sigmoid,
    tune_thresholds,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def random_rows(n=200, labels=7):
    rng = np.random.default_rng(0)
    targets = (rng.random((n, labels)) < 0.3).astype(int)
    probabilities = np.clip(0.3 * targets + 0.7 * rng.random((n, labels)), 0, 1)
    return probabilities, targets


def scikit_learn_scores(probabilities, targets, thresholds):
    """As scikit-learn defines them; AUC and average precision over the labels where they are defined."""
    predicted = (probabilities >= thresholds).astype(int)
    scores = {
        "hamming_loss": reference.hamming_loss(targets, predicted),
        "subset_accuracy": reference.accuracy_score(targets, predicted),
    }
    for name in DECISION_METRICS[:7]:
        metric, average = name.split("_")
        score = getattr(reference, f"{metric}_score")
        scores[name] = score(targets, predicted, average=average, zero_division=0)
    positive = targets.sum(axis=0)
    for metric, score, defined in (
        ("roc_auc_macro", reference.roc_auc_score, (positive > 0) & (positive < len(targets))),
        ("average_precision_macro", reference.average_precision_score, positive > 0),
    ):
        per_label = [score(targets[:, label], probabilities[:, label]) for label in np.flatnonzero(defined)]
        scores[metric] = float(np.mean(per_label)) if per_label else None
        scores[f"{metric}_labels"] = len(per_label)
    micro = reference.average_precision_score(targets, probabilities, average="micro")
    scores["average_precision_micro"] = micro if positive.any() else None
    scores["lrap"] = reference.label_ranking_average_precision_score(targets, probabilities)
    return scores


def scores_of(probabilities, targets, thresholds=0.5):
    """All metrics but the loss, at these thresholds."""
    targets = targets.astype(bool)
    return decision_scores(probabilities >= thresholds, targets) | ranking_scores(probabilities, targets)


def test_tuned_metrics_and_the_loss_are_given():
    probabilities, targets = random_rows()
    logits, tuned = np.log(probabilities / (1 - probabilities)), probabilities >= 0.3
    scores = multilabel_scores(logits, targets, 0.25, tuned)
    expected = {"loss": 0.25, **scores_of(probabilities, targets)}
    at_thresholds = {f"tuned_{name}": score for name, score in decision_scores(tuned, targets > 0).items()}
    assert scores == pytest.approx(expected | at_thresholds, abs=1e-12)
    assert list(scores) == list(METRICS)
    assert all(type(value) in (int, float) for value in scores.values())


@st.composite
def rows(draw):
    n, labels = draw(st.integers(2, 10)), draw(st.integers(2, 5))
    score = st.one_of(st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.floats(0, 1))
    return draw(arrays(np.float64, (n, labels), elements=score)), draw(
        arrays(np.int64, (n, labels), elements=st.integers(0, 1))
    )


@settings(max_examples=40)
@given(rows(), st.sampled_from([0.3, 0.5]), st.sampled_from([0, 10**9]))
def test_equals_scikit_learn_on_any_rows(data, threshold, most_compared):
    expected = scikit_learn_scores(*data, threshold)
    with patch.object(multi_label_scores, "MOST_COMPARED", most_compared):  # none of the rows, or all
        assert scores_of(*data, threshold) == pytest.approx(expected, abs=1e-12, rel=0)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_score_is_none_throughout(shape):
    nothing = np.empty(shape)
    assert multilabel_scores(nothing, nothing, None, nothing > 0) == dict.fromkeys(METRICS)


def test_per_label_table_averages_to_the_macro_metrics():
    probabilities, targets = random_rows()
    targets[:, 2] = 0
    thresholds = np.linspace(0.2, 0.8, 7)
    table = per_label_table(probabilities, targets, thresholds, list("abcdefg"), probabilities >= thresholds)
    assert [row["label"] for row in table] == list("abcdefg")
    assert [row["threshold"] for row in table] == thresholds.tolist()
    assert [row["support"] for row in table] == targets.sum(axis=0).tolist()
    assert table[2]["roc_auc"] is None
    assert table[2]["average_precision"] is None
    assert table[2]["f1"] == 0

    scores = scores_of(probabilities, targets, thresholds)
    for metric in ("precision", "recall", "f1", "roc_auc", "average_precision"):
        defined = [row[metric] for row in table if row[metric] is not None]
        assert np.mean(defined) == pytest.approx(scores[f"{metric}_macro"], abs=1e-12)


def test_sigmoid_is_the_logistic_function_without_overflow():
    logits = np.array([-1e4, -745.0, -3.0, 0.0, 3.0, 1e4], dtype=np.float32)
    found = sigmoid(logits)
    expected = torch.sigmoid(torch.tensor(logits, dtype=torch.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-300)
    assert found.dtype == np.float64


COST = Objective("cost", miss_cost=2.0)


def tuned(scores, truth):
    return tune_thresholds(np.array([scores]).T, np.array([truth]).T, COST)[0]


@settings(max_examples=30)
@given(rows(), st.randoms(use_true_random=False))
def test_row_order_does_not_matter(data, random):
    probabilities, targets = data
    order = random.sample(range(len(targets)), len(targets))
    np.testing.assert_array_equal(
        tune_thresholds(probabilities, targets), tune_thresholds(probabilities[order], targets[order])
    )


@pytest.mark.parametrize(
    ("scores", "truth", "cut"),
    [
        ([0.1, 0.2, 0.6, 0.7], [0, 0, 1, 1], 0.5),  # between the scores that it separates
        # Cuts after row 1 and after row 4 cost 2, one miss or two false positives; the nearest to one half,
        # an eighth of the gap below 0.5. Then its mirror image, and two that are equally near.
        ([0.9, 0.8, 0.7, 0.5, 0.4], [1, 0, 0, 1, 0], 0.5 - 0.1 / 8),
        ([0.7, 0.5, 0.3, 0.2, 0.1], [1, 0, 0, 1, 0], 0.5 + 0.2 / 8),
        ([0.875, 0.625, 0.5, 0.375, 0.125], [1, 0, 0, 1, 0], 0.65625),
        ([0.2, 0.2, 0.2], [0, 1, 0], 0.175),
        ([0.0, 0.0, 0.0], [0, 1, 0], 0.0),
        ([0.1, 0.7, 0.9], [0, 0, 0], 0.5),
        ([0.1, 0.7, 0.9], [1, 1, 1], 0.5),
        ([], [], 0.5),
    ],
)
def test_the_cut_of_a_label(scores, truth, cut):
    assert tuned(scores, truth) == pytest.approx(cut)


# The middle of two neighbouring floats rounds to the even mantissa: up for one of these, down for the other.
@pytest.mark.parametrize("low", [0.3, np.nextafter(0.3, 1)])
def test_adjacent_floats_are_still_separated(low):
    high = np.nextafter(low, 1)
    cut = tuned([low, high], [0, 1])
    assert (np.array([low, high]) >= cut).tolist() == [False, True]


def rare_labels(rows, seed):
    """Logits of 60 labels, most of them rare, and what is true."""
    rng = np.random.default_rng(seed)
    logits = np.linspace(-8, -1, 60) + rng.normal(0, 3, (rows, 60))
    return logits, rng.random((rows, 60)) < sigmoid(logits)


def mean_f1(probabilities, targets, thresholds):
    decided = probabilities >= thresholds
    return np.mean([f1_score(targets, decided, average=a, zero_division=0) for a in ("micro", "macro")])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rows", [60, 1000])
def test_thresholds_for_f1_hold_on_other_rows(rows, seed):
    (logits, truth), (others, other_truth) = rare_labels(rows, seed), rare_labels(5000, seed + 10)
    found = tune_thresholds(sigmoid(logits), truth)
    scores, order = np.sort(sigmoid(logits), axis=0)[::-1], np.argsort(-logits, axis=0)
    hits = np.take_along_axis(truth, order, axis=0).cumsum(axis=0)
    f1 = 2 * hits / (np.arange(rows)[:, None] + 1 + truth.sum(axis=0))
    best = np.take_along_axis(scores, f1.argmax(axis=0)[None], axis=0)[0]
    score = mean_f1(sigmoid(others), other_truth, found)
    assert score > mean_f1(sigmoid(others), other_truth, 0.5) + 0.015
    assert score > mean_f1(sigmoid(others), other_truth, best)


def test_calibration_does_not_change_decisions_for_f1():
    logits, truth = rare_labels(200, 0)
    moved = 0.5 * logits + 2
    one, two = (sigmoid(x) >= tune_thresholds(sigmoid(x), truth) for x in (logits, moved))
    np.testing.assert_array_equal(one, two)


def test_labels_that_nothing_speaks_for_are_not_given_for_f1():
    probabilities = np.random.default_rng(0).uniform(0.001, 0.01, (50, 20))
    probabilities[::2, 0] = 0.9
    decided = probabilities >= tune_thresholds(probabilities, probabilities > 0.5)
    np.testing.assert_array_equal(decided, probabilities > 0.5)


def value_of(objective, decided, truth):
    hits, predicted, positive = (decided & truth).sum(), decided.sum(), truth.sum()
    precision, recall = (hits / predicted if predicted else 1.0), hits / positive
    return {
        "precision_at_recall": precision if recall >= objective.target else -1,
        "recall_at_precision": recall if precision >= objective.target else -1,
        "cost": -((predicted - hits) + objective.miss_cost * (positive - hits)),
    }[objective.name]


OBJECTIVES = [
    Objective("precision_at_recall", 0.6),
    Objective("recall_at_precision", 0.6),
    Objective("cost", miss_cost=0.4),
    Objective("cost", miss_cost=5.0),
]


@settings(max_examples=40)
@given(rows(), st.sampled_from(OBJECTIVES))
def test_no_threshold_is_better_for_the_objective(data, objective):
    probabilities, targets = data[0], data[1].astype(bool)
    thresholds = tune_thresholds(probabilities, targets, objective)
    for label in np.flatnonzero(targets.any(axis=0) & ~targets.all(axis=0)):
        scores, truth = probabilities[:, label], targets[:, label]
        best = max(value_of(objective, scores >= cut, truth) for cut in (*scores, 2.0))  # 2: none
        assert value_of(objective, scores >= thresholds[label], truth) == best


def sample(rows=400, seed=0):
    """Logits of three labels, too sure by a factor of 3, not sure enough, and right, and what is true."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-0.5, 1.5, (rows, 3))
    return logits * [3.0, 0.5, 1.0], (rng.random((rows, 3)) < sigmoid(logits)).astype(np.uint8)


def lowest(logits, labels):
    def loss_at(temperature):
        return MultiLabelLoss().mean(logits / temperature, labels)

    return minimize_scalar(loss_at, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-9}).x


def test_the_temperature_is_the_one_with_the_least_loss():
    logits, labels = sample()
    common, found = (fit_temperatures(logits, labels, per_label) for per_label in (False, True))
    assert common == pytest.approx([lowest(logits, labels)] * 3, rel=1e-5)
    each = [lowest(logits[:, n], labels[:, n]) for n in range(3)]
    assert found == pytest.approx(each, rel=1e-5)
    assert found == pytest.approx([3, 0.5, 1], rel=0.3)
    labels[:, 0] = np.arange(len(labels)) < 9  # too few rows for a temperature of its own
    common, found = (fit_temperatures(logits, labels, per_label) for per_label in (False, True))
    assert found[0] == common[0] != found[1]


def test_temperatures_stay_within_their_bounds():
    logits = np.repeat([[4.0], [-4.0]], 20, axis=0)
    assert fit_temperatures(logits, logits > 0, True) == pytest.approx([TEMPERATURE_RANGE[0]], rel=1e-3)
    assert fit_temperatures(logits, logits < 0, True) == pytest.approx([TEMPERATURE_RANGE[1]], rel=1e-3)


def noise(rows=300, labels=4, seed=0):
    """Logits that say nothing about the labels."""
    rng = np.random.default_rng(seed)
    return {
        "logits": rng.normal(0, 2, (rows, labels)),
        "targets": (rng.random((rows, labels)) < 0.1).astype(np.uint8),
    }


def test_a_row_is_decided_by_thresholds_that_have_not_seen_it():
    found = noise()
    tuner = ThresholdTuner(seed=3, calibration="temperature_per_label")

    def held_out(rows):
        return tuner.calibrated(**rows), tuner.decide(**rows, thresholds=None, rows="rows")

    logits, decided = held_out(found)
    for row in (0, 17, 299):
        other = {**found, "targets": found["targets"].copy()}
        other["targets"][row] ^= 1
        changed = held_out(other)
        assert np.array_equal(changed[1][row], decided[row])
        assert np.array_equal(changed[0][row], logits[row])
        assert not np.array_equal(changed[0], logits)  # rows of other folds do see it
    again = held_out(found)
    assert np.array_equal(again[0], logits)
    assert np.array_equal(again[1], decided)


def test_given_thresholds_are_used_as_they_are():
    found, given = noise(), np.array([0.1, 0.2, 0.3, 0.9])
    tuner = ThresholdTuner(given)
    assert tuner.fit(**found).values is given
    decided = tuner.decide(**found, thresholds=None, rows="rows")
    assert np.array_equal(decided, sigmoid(found["logits"]) >= given)
    assert tuner.fit(*np.zeros((2, 0, 4))).values is given  # without validation rows


@pytest.mark.parametrize(
    ("calibration", "objective"),
    [("none", Objective("cost", miss_cost=3.0)), ("temperature_per_label", Objective())],
)
def test_a_trained_model_decides_the_rows_that_chose_its_thresholds_as_its_training_did(
    calibration, objective
):
    found, given = noise(), np.array([0.1, 0.2, 0.3, 0.9])
    chosen = ThresholdTuner(objective=objective, seed=3, calibration=calibration)
    fitted, metrics = chosen.report(**found, names="abcd", rows="rows")
    config = SimpleNamespace(threshold_tuning=json.loads(json.dumps(fitted.tuning)))
    config.temperatures = None if calibration == "none" else fitted.temperatures.tolist()
    tuner = ThresholdTuner().of_trained(config)
    in_training = chosen.decide(**found, thresholds=None, rows="rows")
    scores = decision_scores(in_training, found["targets"] > 0)
    assert np.mean([row["f1"] for row in metrics["eval_per_label"]]) == pytest.approx(scores["f1_macro"])
    found["logits"] = found["logits"] / fitted.temperatures
    assert np.array_equal(tuner.decide(**found, thresholds=fitted.values, rows="rows"), in_training)
    at_thresholds = sigmoid(found["logits"]) >= fitted.values
    assert np.array_equal(tuner.decide(**found, thresholds=fitted.values, rows="other rows"), at_thresholds)
    assert not np.array_equal(at_thresholds, in_training)
    by_hand = ThresholdTuner(given).of_trained(config)
    assert np.array_equal(
        by_hand.decide(**found, thresholds=given, rows="rows"), (sigmoid(found["logits"]) >= given)
    )
    assert ThresholdTuner(given).report(**found, names="abcd", rows="rows")[0].tuning is None


def test_what_is_reported_of_an_export():
    found = dict(zip(("logits", "targets"), sample(), strict=True)) | {"names": "abc", "rows": "rows"}
    fitted, metrics = ThresholdTuner(calibration="temperature_per_label").report(**found)
    assert (fitted.temperatures != 1).all()
    assert metrics["eval_calibrated_ece"] < metrics["eval_ece"]
    assert metrics["eval_calibrated_binary_cross_entropy"] < metrics["eval_binary_cross_entropy"]
    assert [row["threshold"] for row in metrics["eval_per_label"]] == fitted.values.tolist()
    plain, metrics = ThresholdTuner().report(**found)
    assert (plain.temperatures == 1).all()
    assert set(metrics) == {"eval_per_label", "eval_ece", "eval_tuned_folds"}
    few = found | {name: found[name][:10] for name in ("logits", "targets")}  # eight in a fold's other rows
    metrics = ThresholdTuner(calibration="temperature").report(**few)[1]
    assert metrics["eval_calibrated_binary_cross_entropy"] != metrics["eval_binary_cross_entropy"]


def test_labels_have_figures_and_their_worst_rows():
    rng = np.random.default_rng(0)
    targets = (rng.random((40, 5)) < 0.3).astype(np.uint8)
    targets[:, 4] = 0  # nobody has it
    chances = np.clip(targets * 0.6 + rng.random((40, 5)) * 0.4, 0.01, 0.99)
    chances[7] = np.where(targets[7], 0.001, 0.999)  # all wrong
    texts = [f"text {row}" for row in range(40)]
    logits = np.log(chances / (1 - chances))
    split = SimpleNamespace(texts=texts, pairs=None)
    found = report_content(
        ThresholdTuner(np.full(5, 0.5)), logits, targets, ["$\\frac{$", "$0-$50", *"cde"], split
    )
    names = ["label_f1", "label_precision_recall", "label_calibration", "label_confusion"]
    assert [name for name, figure in found.figures.items() if as_image(figure).ndim == 3] == names
    first = found.figures["label_f1"].axes[0].get_yticklabels()[0].get_text()
    assert first.endswith(f"({targets.sum(axis=0).max()})")
    (section,) = found.sections
    assert len(section.rows) == MAX_ROWS
    assert section.rows[0][3] == "text 7"


def test_a_threshold_above_all_scores_is_at_the_end_of_its_curve():
    chances, truth = np.array([[0.2], [0.4], [0.6]]), np.array([[False], [True], [False]])
    fitted, logits = Thresholds(np.array([2.0]), np.array([0.8])), 2 * np.log(chances / (1 - chances))
    held_out = np.full((3, 1), 0.5)
    drawn = figures(held_out, truth, fitted, logits, chances >= 0.8, ["a"])["label_precision_recall"]
    assert drawn.axes[0].lines[0].get_xydata().tolist() == [[1, 1 / 3], [1, 0.5], [0, 0], [0, 1]]
    assert drawn.axes[0].lines[1].get_xydata().tolist() == [[0, 1]]


def test_rows_without_labels_have_no_figures():
    nothing, fitted = np.zeros((3, 2), dtype=bool), Thresholds(np.ones(2), np.full(2, 0.5))
    assert figures(np.full((3, 2), 0.5), nothing, fitted, nothing, nothing, ["a", "b"]) == {}


def test_the_calibration_error_is_the_weighted_distance_from_the_diagonal():
    chances = np.array([[0.25], [0.25], [0.95], [0.95]])
    error = expected_calibration_error(chances, np.array([[0], [1], [1], [1]]))
    assert error == pytest.approx((0.25 * 2 + 0.05 * 2) / 4)
