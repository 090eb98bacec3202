"""Regression on texts: cells, the scale in the output layer, scores."""

import json
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from classify import Arguments
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score
from tables import table
from tiny_models import sizes
from transformers import AutoModelForSequenceClassification, BertConfig

from samerun.data.tokens import Ragged
from samerun.errors import InputError
from samerun.text.head import output_layer, rescaled, trained_outputs
from samerun.text.regression import Numbers, Regression, regression_scores

SIZES = sizes(4, heads=1, inner=4, words=9) | {"num_labels": 2}


def problem(values=((1.0, 100.0), (3.0, 300.0), (8.0, 200.0)), **given):
    given |= {"problem_type": "regression", "label_columns": ("a", "b")}
    made = Regression(Arguments(output_dir="runs/a", **given))
    made.choose(BertConfig(), Numbers(np.array(values)))
    return made


def test_numbers_and_texts_of_numbers_are_read():
    found = problem().read(table({"a": [1, "2.5", " -3e2 "], "b": [0.5, 1, 2]}))
    assert found.values.tolist() == [[1, 0.5], [2.5, 1], [-300, 2]]
    made = problem()
    assert made.read(table({"c": [1]})) is None
    assert not made.notes
    assert made.read(table({"a": [1]})) is None  # some of the columns: a slip
    assert "no metrics and references, as it has no b" in made.notes[0]
    with pytest.raises(InputError, match=r"a is '2020_01' .*, expected a number"):
        problem().read(table({"a": ["2020_01"], "b": [1]}))


def test_references_are_not_rounded_and_values_are_those_of_fp32():
    made, true = problem(), [[20240461.0, 0.1], [1.0, 0.1], [2.0, 0.1]]
    split = SimpleNamespace(labelled=True, targets=Ragged.of(true, "float64"))
    found = np.array([[20240468.0, 1 / 3], [1.0, 0.0], [2.0, 0.5]], dtype=np.float32)
    lines = list(made.lines({"logits": found}, split))
    assert [[*line["reference"].values()] for line in lines] == true
    assert np.array_equal(np.array([[*line["values"].values()] for line in lines], np.float32), found)
    assert made.score({"logits": found}, split)["r2_b"] is None  # one value, whose mean is rounded
    assert made.default_metric == "r2"
    made.prepare({"validation": split.targets})
    assert made.default_metric == "mse"  # r2 of one value is undefined


def test_columns_have_the_order_of_the_trained_model(tmp_path):
    BertConfig(id2label={0: "a", 1: "b"}).save_pretrained(tmp_path)
    given = {"model_name_or_path": str(tmp_path), "problem_type": "regression", "do_eval": True}
    for named, expected in ((None, ("a", "b")), (("b", "a"), ("a", "b")), (("x", "y"), ("x", "y"))):
        assert Regression(Arguments(label_columns=named, do_train=False, **given)).columns == expected


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_the_evaluated_loss_is_the_trained_one_before_and_after_the_export(loss):
    made = problem(loss=loss)
    logits = torch.tensor([[0.5, -1.0], [2.0, 0.1]])
    true = torch.tensor([[2.0, 150.0], [9.0, 250.0]])
    trained = float(made.losses(logits, true).mean())
    predictions = {"logits": made.outputs(logits).numpy(), "labels": true.numpy()}
    split = SimpleNamespace(targets=Ragged.of(true.tolist(), "float64"))
    assert made.score(predictions, split)["loss"] == pytest.approx(trained, rel=1e-5)
    other = problem([(1.0, 2.0), (2.0, 9.0)])
    model = AutoModelForSequenceClassification.from_config(BertConfig(**SIZES))
    vars(model.config).update(json.loads(json.dumps(made.config_entries())))
    other.use_exported(model)
    assert torch.equal(other.outputs(logits), logits)
    assert other.score(predictions, split)["loss"] == pytest.approx(trained, rel=1e-5)


def test_the_exported_layer_gives_the_original_units_and_is_undone_by_a_further_training():
    made = problem([(1995.0, 2000.0), (2005.0, 2020.0)])
    made.labels = ["a", "b"]
    model = AutoModelForSequenceClassification.from_config(BertConfig(**SIZES)).eval()
    ids, before = torch.tensor([[3, 4], [5, 6]]), {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        expected = made.outputs(model(ids).logits)
        model.load_state_dict(rescaled(model, *made.export_scale, before))
        torch.testing.assert_close(model(ids).logits, expected)
        exact = deepcopy(model)
        exact.config.regression = made.config_entries()["regression"]
        deepcopy(made).use_exported(exact)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(exact(ids).logits, expected, rtol=0, atol=0.1)
        made.adopt_head(model, trained_outputs(model, set(), None, 2))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=1e-4)
    assert not trained_outputs(model, {"classifier.weight", "classifier.bias"}, None, 2).any()
    output_layer(model, 2)[1].bias = None
    with pytest.raises(InputError, match="no linear layer with a bias for its 2 value"):
        made.adopt_head(model, np.zeros(2, dtype=bool))


def test_scores_are_scikit_learns():
    generator = np.random.default_rng(0)
    true = generator.normal(size=(50, 2)) * [1, 10]
    found = true + generator.normal(size=(50, 2))
    scores = regression_scores(found, true, ("a", "b"))
    pairs = list(zip(found.T, true.T, strict=True))
    expected = {
        "mse": [mean_squared_error(y, x) for x, y in pairs],
        "mae": [mean_absolute_error(y, x) for x, y in pairs],
        "r2": [r2_score(y, x) for x, y in pairs],
    }
    for name, (a, b) in expected.items():
        assert (scores[f"{name}_a"], scores[f"{name}_b"]) == pytest.approx((a, b))
        assert scores[name] == pytest.approx((a + b) / 2)


def test_equal_values_are_one_value_although_their_mean_is_rounded():
    with pytest.raises(InputError, match=r"a: its training rows have one value only \(0\.1\)"):
        problem(values=[(0.1, number) for number in range(3)])


def test_undefined_scores_are_none():
    scores = regression_scores(np.zeros((3, 1)), np.ones((3, 1)), ("a",))
    assert scores == {"mse": 1, "mae": 1, "r2": None, "pearson": None, "spearman": None}
    assert set(regression_scores(np.zeros((0, 1)), np.zeros((0, 1)), ("a",)).values()) == {None}


def test_a_metric_of_one_column_does_not_need_the_others():
    made, ids = problem(), Ragged.of([[1.0, 2.0], [2.0, 2.0]], "float64")
    made.check_best_metric("r2_a", ids)
    for name in ("r2", "r2_b"):
        with pytest.raises(InputError, match=rf"{name} is undefined on these validation rows \(b has one"):
            made.check_best_metric(name, ids)
