import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn import metrics as reference

from samerun.metrics.multilabel import (
    DECISION_METRICS,
    RANKING_METRICS,
    binary_cross_entropy,
    decision_scores,
    multilabel_scores,
    per_label_table,
    ranking_scores,
    sigmoid,
)
from samerun.metrics.thresholds import tune_thresholds


@pytest.fixture(autouse=True)
def _no_warning_is_tolerated():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def random_rows(seed=0, n=200, labels=7, ties=False):
    rng = np.random.default_rng(seed)
    targets = (rng.random((n, labels)) < 0.3).astype(int)
    probabilities = np.clip(0.3 * targets + 0.7 * rng.random((n, labels)), 0, 1)
    return (np.round(probabilities, 1) if ties else probabilities), targets


def scikit_learn_scores(probabilities, targets, thresholds):
    """Every metric as scikit-learn defines it, AUC and average precision over the labels where they are
    defined."""
    predicted = (probabilities >= thresholds).astype(int)
    scores = {
        f"{metric}_{average}": getattr(reference, f"{metric}_score")(
            targets, predicted, average=average, zero_division=0
        )
        for metric, average in (
            ("f1", "micro"),
            ("f1", "macro"),
            ("f1", "samples"),
            ("precision", "micro"),
            ("recall", "micro"),
            ("precision", "macro"),
            ("recall", "macro"),
        )
    }
    scores["hamming_loss"] = reference.hamming_loss(targets, predicted)
    scores["subset_accuracy"] = reference.accuracy_score(targets, predicted)
    positive = targets.sum(axis=0)
    for metric, score, defined in (
        ("roc_auc_macro", reference.roc_auc_score, (positive > 0) & (positive < len(targets))),
        ("average_precision_macro", reference.average_precision_score, positive > 0),
    ):
        per_label = [score(targets[:, label], probabilities[:, label]) for label in np.flatnonzero(defined)]
        scores[metric] = float(np.mean(per_label)) if per_label else None
        scores[f"{metric}_labels"] = len(per_label)
    scores["lrap"] = reference.label_ranking_average_precision_score(targets, probabilities)
    return scores


def assert_same_scores(actual, expected):
    assert actual.keys() == expected.keys()
    assert {name for name, value in actual.items() if value is None} == {
        name for name, value in expected.items() if value is None
    }
    for name, value in expected.items():
        if value is not None:
            assert actual[name] == pytest.approx(value, abs=1e-12, rel=0), name


@st.composite
def rows(draw):
    n, labels = draw(st.integers(2, 10)), draw(st.integers(2, 5))
    score = st.one_of(st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.floats(0, 1))
    return draw(arrays(np.float64, (n, labels), elements=score)), draw(
        arrays(np.int64, (n, labels), elements=st.integers(0, 1))
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("thresholds", [0.5, 0.3, np.linspace(0.2, 0.8, 7)])
def test_equals_scikit_learn(ties, thresholds):
    probabilities, targets = random_rows(ties=ties)
    assert_same_scores(
        multilabel_scores(probabilities, targets, thresholds),
        scikit_learn_scores(probabilities, targets, thresholds),
    )


@settings(max_examples=80)
@given(rows())
def test_equals_scikit_learn_on_any_rows(data):
    probabilities, targets = data
    assert_same_scores(
        multilabel_scores(probabilities, targets), scikit_learn_scores(probabilities, targets, 0.5)
    )


def test_metrics_are_those_of_the_contract():
    scores = multilabel_scores(*random_rows())
    contract = """f1_micro f1_macro f1_samples precision_micro recall_micro precision_macro recall_macro
        roc_auc_macro
        average_precision_macro hamming_loss subset_accuracy lrap"""
    assert scores.keys() == {*contract.split(), "roc_auc_macro_labels", "average_precision_macro_labels"}
    assert scores.keys() == {*DECISION_METRICS, *RANKING_METRICS}
    assert all(type(value) in (int, float) for value in scores.values())


@pytest.mark.parametrize(
    ("value", "auc_labels", "precision_labels", "average_precision"), [(0, 0, 0, None), (1, 0, 7, 1.0)]
)
def test_single_class(value, auc_labels, precision_labels, average_precision):
    probabilities, targets = random_rows()
    targets[:] = value
    scores = multilabel_scores(probabilities, targets)
    assert scores["roc_auc_macro"] is None
    assert scores["roc_auc_macro_labels"] == auc_labels
    assert scores["average_precision_macro"] == average_precision
    assert scores["average_precision_macro_labels"] == precision_labels
    assert scores["lrap"] == 1


def test_one_label_is_legal():
    probabilities, targets = random_rows(labels=1)
    scores = multilabel_scores(probabilities, targets)
    assert scores["roc_auc_macro"] == pytest.approx(
        reference.roc_auc_score(targets, probabilities), abs=1e-12
    )
    assert (
        scores["f1_macro"]
        == scores["f1_micro"]
        == pytest.approx(reference.f1_score(targets, probabilities >= 0.5))
    )
    assert scores["lrap"] == 1


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_score_is_none_throughout(shape):
    scores = multilabel_scores(np.empty(shape), np.empty(shape))
    assert scores == dict.fromkeys((*DECISION_METRICS, *RANKING_METRICS))


def test_more_pairs_than_32_bits():
    n = 100_000  # 2.5e9 pairs of a positive and a negative row
    scores = ranking_scores(np.linspace(0, 1, n).reshape(-1, 1), (np.arange(n) >= n // 2).reshape(-1, 1))
    assert scores["roc_auc_macro"] == 1
    assert scores["average_precision_macro"] == pytest.approx(1, abs=1e-12)


def test_float32_and_bool_are_accepted():
    probabilities, targets = random_rows()
    narrow = probabilities.astype(np.float32)
    assert multilabel_scores(narrow, targets.astype(bool)) == multilabel_scores(
        narrow.astype(np.float64), targets
    )


@pytest.mark.parametrize("thresholds", [None, np.linspace(0.2, 0.8, 7), "tune"])
def test_logits_give_the_loss_and_the_same_scores(thresholds):
    probabilities, targets = random_rows()
    logits = np.log(probabilities / (1 - probabilities))
    scores = multilabel_scores(
        logits, targets, from_logits=True, pos_weight=2.0, label_smoothing=0.2, tuned_thresholds=thresholds
    )
    expected = {
        "loss": binary_cross_entropy(logits, np.where(targets, 0.9, 0.1), 2.0),
        **multilabel_scores(probabilities, targets),
    }
    if thresholds is not None:
        chosen = tune_thresholds(probabilities, targets) if isinstance(thresholds, str) else thresholds
        tuned = decision_scores(probabilities, targets, chosen)
        expected |= {f"tuned_{name}": score for name, score in tuned.items()}
    assert list(scores) == list(expected)
    assert scores == pytest.approx(expected, abs=1e-12)


def test_per_label_table_averages_to_the_macro_metrics():
    probabilities, targets = random_rows()
    targets[:, 2] = 0
    thresholds = np.linspace(0.2, 0.8, 7)
    table = per_label_table(probabilities, targets, thresholds, list("abcdefg"))
    assert [row["label"] for row in table] == list("abcdefg")
    assert [row["threshold"] for row in table] == thresholds.tolist()
    assert [row["support"] for row in table] == targets.sum(axis=0).tolist()
    assert table[2]["roc_auc"] is None
    assert table[2]["average_precision"] is None
    assert table[2]["f1"] == 0

    scores = multilabel_scores(probabilities, targets, thresholds)
    for metric in ("precision", "recall", "f1", "roc_auc", "average_precision"):
        defined = [row[metric] for row in table if row[metric] is not None]
        assert np.mean(defined) == pytest.approx(scores[f"{metric}_macro"], abs=1e-12)


def test_per_label_table_without_rows():
    (row,) = per_label_table(np.empty((0, 1)), np.empty((0, 1)), 0.5, ["a"])
    undefined = dict.fromkeys(("precision", "recall", "f1", "roc_auc", "average_precision"))
    assert row == {"label": "a", "support": 0, "threshold": 0.5, **undefined}


def test_per_label_table_wants_one_name_per_label():
    with pytest.raises(ValueError, match="2 label names for 7 labels"):
        per_label_table(*random_rows(), 0.5, ["a", "b"])


def test_sigmoid_is_the_logistic_function_without_overflow():
    logits = np.array([-1e4, -745.0, -3.0, 0.0, 3.0, 1e4], dtype=np.float32)
    found = sigmoid(logits)
    np.testing.assert_allclose(
        found, torch.sigmoid(torch.tensor(logits, dtype=torch.float64)), rtol=1e-13, atol=1e-300
    )
    assert found.dtype == np.float64


@pytest.mark.parametrize("pos_weight", [None, 3.0, np.array([0.5, 1, 2, 10, 100])])
def test_binary_cross_entropy_equals_torch(pos_weight):
    rng = np.random.default_rng(0)
    logits, targets = 20 * rng.standard_normal((30, 5)), (rng.random((30, 5)) < 0.3).astype(float)
    logits[0] = [800, -800, 0, 1e-9, -1e-9]  # where exp would overflow
    weight = None if pos_weight is None else torch.as_tensor(pos_weight, dtype=torch.float64)
    expected = torch.nn.BCEWithLogitsLoss(pos_weight=weight)(
        torch.as_tensor(logits), torch.as_tensor(targets)
    ).item()
    assert binary_cross_entropy(logits, targets, pos_weight) == pytest.approx(expected, rel=1e-12)


def test_binary_cross_entropy_of_nothing_is_none():
    assert binary_cross_entropy(np.empty((0, 4)), np.empty((0, 4))) is None


def test_binary_cross_entropy_refuses_what_has_no_mean():
    with pytest.raises(ValueError, match="diverged"):
        binary_cross_entropy(np.array([[np.inf]]), np.array([[1]]))
    with pytest.raises(ValueError, match="one shape"):
        binary_cross_entropy(np.zeros((2, 3)), np.zeros((3,)))
