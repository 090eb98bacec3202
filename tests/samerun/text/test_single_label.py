"""Single-label classification of texts: cells, weights, calibration, scores."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from classify import Arguments
from sklearn.metrics import f1_score, matthews_corrcoef
from sklearn.utils.class_weight import compute_class_weight
from tables import table

from samerun.classes import confusion_matrix, single_label_scores, weighted_scores
from samerun.data.tokens import Ragged
from samerun.errors import InputError
from samerun.text.labels import label_ids, read_classes
from samerun.text.single_label import SingleLabel, fit_temperature, softmax


def rows(count=400, classes=4, seed=0):
    generator = np.random.default_rng(seed)
    true = generator.choice(classes, count, p=np.arange(1, classes + 1) / sum(range(classes + 1)))
    logits = generator.normal(size=(count, classes)) + 2 * np.eye(classes)[true]
    return logits.astype(np.float32), true


def problem(count, **given):
    made = SingleLabel(Arguments(output_dir="runs/a", problem_type="single_label", **given))
    made.labels = [f"label {number}" for number in range(len(count))]
    ids = Ragged.of([[label] for label, n in enumerate(count) for _ in range(n)])
    made.prepare({"train": ids})
    return made


def test_texts_numbers_and_lists_of_one_are_labels():
    found = read_classes(table({"label": [" a ", 3, ["b"], [4]]}), "label", [])
    assert found.rows == [("a",), ("3",), ("b",), ("4",)]
    assert found.names == ["3", "4", "a", "b"]  # as in a training, whatever rows come first
    assert read_classes(table({"label": [True, "True"]}), "label", []).names == ["True"]
    assert read_classes(table({"label": ["a"]}), "other", []) is None


def test_labels_that_look_like_several_are_noted():
    notes = []
    read_classes(table({"label": ["a|b", "a"]}), "label", notes)
    assert "1 row(s) have a label with '|' in it" in notes[0]


def test_a_label_that_a_model_has_twice_is_explained():
    cells = table({"label": ["b", "dog"]})
    found = read_classes(cells, "label", [])
    with pytest.raises(InputError, match=r"label 'b' is not in .*; did you mean 'b \(0\)'\?"):
        label_ids(cells, found, ["b (0)", "b (1)", "dog"], None, [])


def test_balanced_weights_are_scikit_learns_and_are_limited():
    count = (30, 10, 2)
    true = np.repeat(np.arange(3), count)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=true)
    np.testing.assert_allclose(problem(count, pos_weight="balanced").weight, expected)
    assert problem(count, pos_weight="balanced:2").weight.max() == 2
    assert problem(count).weight is None


def test_a_row_has_the_weight_of_its_class_also_with_smoothing():
    both = problem((40, 30, 20, 10), pos_weight="balanced", label_smoothing_factor=0.1)
    smooth = problem((40, 30, 20, 10), label_smoothing_factor=0.1)
    logits, true = map(torch.from_numpy, rows())
    expected = smooth.losses(logits, true) * torch.tensor(both.weight, dtype=logits.dtype)[true]
    torch.testing.assert_close(both.losses(logits, true), expected)


@pytest.mark.parametrize("given", [{}, {"label_smoothing_factor": 0.1}, {"pos_weight": "balanced"}])
def test_the_evaluated_loss_is_the_trained_one(given):
    made, (logits, true) = problem((40, 30, 20, 10), **given), rows()
    trained = made.losses(torch.from_numpy(logits), torch.from_numpy(true)).mean()
    found = single_label_scores(logits, true, made.smoothing, made.weight)["loss"]
    assert found == pytest.approx(float(trained), rel=1e-6)
    again = problem((1, 1, 1, 1))
    again.use_exported(SimpleNamespace(config=SimpleNamespace(**made.config_entries())))
    assert again.score({"logits": logits, "labels": true}, None)["loss"] == pytest.approx(found)


@pytest.mark.parametrize("smoothing", [0, 0.2])
@pytest.mark.parametrize("weights", ["none", "balanced"])
def test_no_constant_logits_have_a_smaller_loss_than_the_prior(smoothing, weights):
    made = problem((60, 30, 10), label_smoothing_factor=smoothing, pos_weight=weights)
    true = torch.tensor(np.repeat(np.arange(3), made.count))
    bias = torch.tensor(made.initial_bias(), requires_grad=True)
    made.losses(bias.expand(len(true), -1), true).mean().backward()
    assert bias.grad.abs().max() < 0.02  # half a row is added to each


def test_the_temperature_is_the_lowest_cross_entropys():
    logits, true = rows()
    logits = logits.astype(np.float64) * 3
    best = fit_temperature(logits, true)
    losses = [single_label_scores(logits / (best * factor), true)["loss"] for factor in (0.99, 1, 1.01)]
    assert min(losses) == losses[1]
    assert best > 1.4


def test_weighted_f1_and_matthews_correlation_are_scikit_learns():
    logits, true = rows(classes=6)
    predicted = logits.argmax(1)
    found = weighted_scores(confusion_matrix(predicted, true, 6))
    assert found["f1_weighted"] == pytest.approx(f1_score(true, predicted, average="weighted"))
    assert found["matthews_correlation"] == pytest.approx(matthews_corrcoef(true, predicted))
    one = weighted_scores(confusion_matrix(np.zeros(3, int), np.array([0, 1, 1]), 2))
    assert one["matthews_correlation"] == 0


def test_calibration_does_not_change_the_label_and_is_exported():
    made, (logits, true) = problem((40, 30, 20, 10), calibration="temperature"), rows()
    split = type("Split", (), {"texts": [""] * len(true)})
    metrics = made.fit({"logits": 5 * logits, "labels": true}, split)
    assert metrics["eval_calibrated_ece"] < metrics["eval_ece"]
    assert metrics["eval_calibrated_cross_entropy"] < metrics["eval_cross_entropy"]
    found = made.exported_outputs(5 * logits[:3])
    np.testing.assert_allclose(found, softmax(5 * logits[:3] / made.temperature))
    assert made.config_entries()["temperatures"] == [made.temperature] * 4
