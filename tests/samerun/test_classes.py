import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support, top_k_accuracy_score
from sklearn.metrics import confusion_matrix as their_confusion

from samerun import classes
from samerun.classes import (
    MAX_FIGURE,
    card_sections,
    confusion_matrix,
    evaluation,
    figures,
    per_class_table,
    prediction_lines,
    single_label_scores,
    sorted_classes,
)
from samerun.errors import InputError
from samerun.files import write_json


def test_classes_stand_as_they_are_declared_or_else_in_order():
    assert sorted_classes(["b", "a", "b"], ("b", "never", "a")) == ["b", "never", "a"]
    assert sorted_classes(["b", "a", "b"]) == ["a", "b"]
    assert sorted_classes(["10", "9", "-2", "-1", "0.5"]) == ["-2", "-1", "0.5", "9", "10"]
    assert sorted_classes(["10", "9", "nan"]) == ["10", "9", "nan"]
    with pytest.raises(InputError, match=r"one class only \('a'\)"):
        sorted_classes(["a"], ("a", "b"))


def rows(count=200, classes=7, seed=0):
    generator = np.random.default_rng(seed)
    references = generator.integers(0, classes - 1, count)  # the last class is never there
    logits = generator.normal(size=(count, classes)) + 2 * np.eye(classes)[references]
    return logits.astype(np.float32), references


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_scores_are_those_of_scikit_learn_and_torch(smoothing):
    logits, references = rows()
    predicted = logits.argmax(1)
    found = single_label_scores(logits, references, smoothing)
    loss = torch.nn.functional.cross_entropy(
        torch.tensor(logits), torch.tensor(references), label_smoothing=smoothing
    )
    assert found == pytest.approx(
        {
            "loss": loss.item(),
            "accuracy": accuracy_score(references, predicted),
            "f1_macro": f1_score(references, predicted, average="macro"),
            "top5_accuracy": top_k_accuracy_score(references, logits, k=5, labels=np.arange(7)),
        },
        rel=1e-6,
    )


def test_the_table_and_the_confusion_matrix_are_scikit_learns():
    logits, references = rows()
    predicted, labels = logits.argmax(1), [f"class {number}" for number in range(7)]
    confusion = confusion_matrix(predicted, references, 7)
    theirs = their_confusion(references, predicted, labels=np.arange(7))
    np.testing.assert_array_equal(confusion.toarray(), theirs)
    expected = precision_recall_fscore_support(references, predicted, labels=np.arange(7), zero_division=0)
    table = per_class_table(confusion, labels)
    assert [row["label"] for row in table] == labels
    for name, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        np.testing.assert_allclose([row[name] for row in table], values, rtol=1e-12)


def test_scores_of_few_classes_no_rows_a_huge_logit_or_a_class_that_does_not_exist():
    logits, references = rows(classes=5)
    assert set(single_label_scores(logits, references)) == {"loss", "accuracy", "f1_macro"}
    assert single_label_scores(np.zeros((0, 9)), np.zeros(0, int))["accuracy"] is None
    equal = single_label_scores(np.zeros((9, 9)), np.arange(9))  # the commonest of equally common classes
    assert (equal["accuracy"], equal["top5_accuracy"]) == pytest.approx((1 / 9, 5 / 9))
    assert single_label_scores(np.array([[1e4, -1e4]]), np.array([1]))["loss"] == pytest.approx(2e4)
    with pytest.raises(ValueError, match="class numbers below 2, found 0 to 2"):
        single_label_scores(np.zeros((2, 2)), np.array([0, 2]))


@pytest.mark.parametrize("number", [3, 50])
def test_a_confusion_matrix_shows_the_classes_with_most_errors(number):
    truth = np.repeat(np.arange(number), 9)
    found = np.append(truth, [number - 1] * 4)
    confusion = confusion_matrix(found, np.append(truth, [0] * 4), number)
    figure = figures(confusion, [f"c{label}" for label in range(number)]).figures["confusion_matrix"]
    shown = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert len(shown) == min(number, MAX_FIGURE)
    assert {"c0", f"c{number - 1}"} <= set(shown)


def test_of_many_classes_the_errors_are_listed(tmp_path):
    labels, truth = [f"c{number}" for number in range(20_000)], np.arange(20_000)
    found = truth.copy()
    found[[7, 9, 11]] = [8, 8, 12]
    truth = np.append(truth, [7])
    confusion = confusion_matrix(np.append(found, [8]), truth, len(labels))
    metrics = evaluation(confusion, labels)
    first, *others = metrics["eval_confused_pairs"]
    assert first == {"is": "c7", "predicted": "c8", "rows": 2}
    assert [pair["is"] for pair in others] == ["c9", "c11"]
    assert "eval_confusion_matrix" not in metrics
    write_json(tmp_path / "metrics.json", metrics)
    card = card_sections(tmp_path, labels)
    assert "| c7 | c8 | 2 |" in card
    assert len(card) < 150
    assert len(figures(confusion, labels).figures["confusion_matrix"].axes[0].get_yticklabels()) == MAX_FIGURE


@pytest.mark.parametrize(("number", "shown"), [(100, 100), (101, 10)])
def test_lines_have_all_probabilities_unless_classes_are_many(number, shown):
    logits = np.random.default_rng(0).normal(size=(1, number))
    names = list(map(str, range(number)))
    (line,) = prediction_lines(logits, names, None)
    probabilities = list(line["probabilities"].values())
    assert probabilities == sorted(probabilities, reverse=True)
    assert len(probabilities) == shown
    least = int(logits[0].argmin())
    (line,) = prediction_lines(logits, names, np.array([least]))
    assert list(line["probabilities"])[-1] == line["reference"] == str(least)


def test_lines_do_not_depend_on_how_many_are_made_at_once(monkeypatch):
    logits, references = rows(20)
    labels = list("abcdefg")
    whole = list(prediction_lines(logits, labels, references))
    monkeypatch.setattr(classes, "SORTED_CELLS", 22)
    assert list(prediction_lines(logits, labels, references)) == whole
