from unittest.mock import Mock

import numpy as np
import pytest
import segment
from classify import Arguments, TextClassification
from refusals import problems_of

from samerun.additional_metrics import AdditionalMetric, compute_additional, load_metrics
from samerun.errors import InputError

METRIC = """
import datasets
import evaluate


class Agreement(evaluate.Metric):
    def _info(self):
        labels = datasets.List(datasets.Value("int32"))
        value = datasets.Value("string") if self.config_name == "texts" else labels
        return evaluate.MetricInfo(
            description="share of equal rows", citation="", inputs_description="",
            features=datasets.Features(predictions=value, references=value),
        )

    def _compute(self, predictions, references, scale=1):
        equal = [a == b for a, b in zip(predictions, references, strict=True)]
        return {"agreement": scale * sum(equal) / len(equal), "rows": equal, "f1_micro": 0.25}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a metric; what `evaluate` caches goes beside it."""
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path / "metrics")
    monkeypatch.setattr("evaluate.config.HF_EVALUATE_OFFLINE", True)
    folder = tmp_path / "agreement"
    folder.mkdir()
    (folder / "agreement.py").write_text(METRIC)
    return folder


def fixed(results, spec="near", name="near", **settings):
    """A metric with these results, or one that raises them."""
    return AdditionalMetric(spec, name, Mock(compute=Mock(side_effect=[results])), settings)


def test_a_local_metric_scores_decisions_with_its_settings(folder, capsys):
    decisions, targets = np.array([[0, 1], [1, 1], [0, 0]]), np.array([[0, 1], [1, 0], [0, 0]])
    metrics = load_metrics([str(folder), f"{folder / 'agreement.py'}:scale=3"])
    scores = compute_additional(metrics, decisions, targets, taken=("f1_micro",))
    assert "agreement: rows is not a number and is left out\n" in capsys.readouterr().out
    assert scores["agreement"] == pytest.approx(2 / 3)
    assert scores["agreement_agreement"] == 2.0
    assert scores["agreement_f1_micro"] == 0.25
    assert "f1_micro" not in scores
    of_texts = load_metrics([f"{folder}:texts"])  # a configuration; used again and again
    for prediction, expected in (("a", 0.5), ("b", 0.0), ("a", 0.5)):
        assert compute_additional(of_texts, [prediction, "c"], ["a", "d"])["agreement"] == expected


def test_numbers_of_every_kind_are_kept_and_names_stay_apart():
    first = fixed({"a": np.float32(0.5), "b": 3, "c": np.nan, "d": True})
    second, third = fixed({"a": 0.1}), fixed({"a": 0.2}, "near:x=1", x=1)
    metrics = [first, second, third, fixed(0.7, "far", "far")]
    expected = {"a": 0.5, "near_b": 3.0, "c": None, "d": 1.0, "near_a": 0.1, "near_x_1_a": 0.2, "far": 0.7}
    assert compute_additional(metrics, [1], [1], taken={"b"}) == expected
    third.module.compute.assert_called_once_with(predictions=[1], references=[1], x=1)


def test_a_metric_that_fails_is_named(folder):
    message = r"--metrics near: cannot score these rows \(ValueError: average is binary more\)"
    with pytest.raises(InputError, match=message):
        compute_additional([fixed(ValueError("average is binary\nmore"))], [], [])
    with pytest.raises(InputError, match=r"agreement: cannot score these rows \(ValueError: Got a string"):
        compute_additional(load_metrics([str(folder)]), ["a"], ["b"])


@pytest.mark.parametrize(
    ("chosen", "direction", "problem"),
    [
        ("f1_micro", None, None),
        ("f1_mircro", None, "no such metric; did you mean f1_micro?.* add --greater_is_better true or false"),
        ("error_rate", None, "no such metric.* add --greater_is_better true or false"),
        ("error_rate", False, None),
    ],
)
def test_the_direction_of_a_metric_of_the_user_must_be_given(folder, chosen, direction, problem):
    arguments = Arguments(
        output_dir="a", metrics=(str(folder),), metric_for_best_model=chosen, greater_is_better=direction
    )
    if problem is None:
        TextClassification(arguments)
    else:
        with pytest.raises(InputError, match=problem):
            TextClassification(arguments)


def test_metrics_that_cannot_be_loaded_are_told_together(folder):
    (folder / "broken.py").write_text("import no_such_package_of_anybody")
    (folder / "empty.py").write_text("x = 1")
    local = [f"{folder}/{name}" for name in ("nowhere", "broken.py", "empty.py")]
    found = problems_of(load_metrics, [*local, "no_such_metric", "a:b:c", "rouge", "rouge"])
    problems = dict(problem.removeprefix("--metrics ").split(": ", 1) for problem in found)
    for name, told in [
        (local[0], "or a folder that holds nowhere.py"),
        ("no_such_metric", "or a folder that holds no_such_metric.py"),
        (local[1], "no_such_package_of_anybody"),
        (local[2], "cannot be loaded as an evaluate.Metric"),
    ]:
        assert told in problems[name]
    assert problems["a:b:c"].startswith("expected NAME_OR_FOLDER[:CONFIG]")
    assert [problem for problem in found if "twice" in problem] == ["--metrics rouge: named twice"]


def test_a_task_without_additional_metrics_refuses_them_at_once():
    arguments = segment.Arguments(output_dir="run", model_name_or_path="m", metrics=("accuracy",))
    with pytest.raises(InputError, match="--metrics: segment does not support additional metrics"):
        segment.Segmentation(arguments)
