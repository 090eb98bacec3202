import json
from types import SimpleNamespace

import numpy as np
import pytest
from classify import Arguments

from samerun.errors import InputError
from samerun.metrics.multilabel import decision_scores, sigmoid
from samerun.metrics.thresholds import Objective, decide
from samerun.parsing import validate
from samerun.text.decisions import Decider, fixed_thresholds, make_decider

LABELS = ["a", "b=c", "标签"]
ROWS, OTHER_ROWS = (SimpleNamespace(content=lambda name=name: name) for name in ("rows", "other rows"))


def noise(rows=300, labels=4, seed=0):
    """Logits that say nothing about the labels."""
    rng = np.random.default_rng(seed)
    return {
        "logits": rng.normal(0, 2, (rows, labels)),
        "labels": (rng.random((rows, labels)) < 0.1).astype(np.uint8),
    }


def test_a_row_is_decided_by_thresholds_that_have_not_seen_it():
    found = noise()
    decider = Decider(seed=3, calibration="temperature_per_label")
    logits, decided = decider.held_out(**found)
    for row in (0, 17, 299):
        other = {**found, "labels": found["labels"].copy()}
        other["labels"][row] ^= 1
        changed = decider.held_out(**other)
        assert np.array_equal(changed[1][row], decided[row])
        assert np.array_equal(changed[0][row], logits[row])
        assert not np.array_equal(changed[0], logits)  # rows of other folds do see it
    again = decider.held_out(**found)
    assert np.array_equal(again[0], logits)
    assert np.array_equal(again[1], decided)


def test_on_rows_that_tuned_them_thresholds_look_better_than_they_are():
    """Scores that mean nothing: no decision is better than giving each label at random, F1 of about 0.18 at
    best."""
    held_out, same_rows, new_rows = [], [], []
    for seed in range(20):
        found, new = noise(100, seed=seed), noise(2000, seed=100 + seed)
        fitted = Decider().fit(**found)
        same_rows.append(
            decision_scores(sigmoid(found["logits"]), found["labels"], fitted.thresholds)["f1_micro"]
        )
        new_rows.append(decision_scores(sigmoid(new["logits"]), new["labels"], fitted.thresholds)["f1_micro"])
        decided = Decider(seed=seed).decisions(found, None, ROWS)
        held_out.append(decision_scores(decided.astype(float), found["labels"])["f1_micro"])
    assert np.mean(same_rows) > np.mean(new_rows) + 0.03
    assert np.mean(held_out) == pytest.approx(np.mean(new_rows), abs=0.02)


def test_given_thresholds_are_used_as_they_are():
    found, given = noise(), np.array([0.1, 0.2, 0.3, 0.9])
    decider = Decider(given)
    assert decider.fit(**found).thresholds is given
    assert np.array_equal(decider.decisions(found, None, ROWS), decide(sigmoid(found["logits"]), given))
    assert decider.fit(*np.zeros((2, 0, 4))).thresholds is given  # without validation rows


def test_a_trained_model_decides_the_rows_that_chose_its_thresholds_as_its_training_did():
    found, given = noise(), np.array([0.1, 0.2, 0.3, 0.9])
    chosen = Decider(objective=Objective("cost", miss_cost=3.0), seed=3)
    fitted, _ = chosen.report(found, "abcd", ROWS)
    config = SimpleNamespace(threshold_tuning=json.loads(json.dumps(fitted.tuning)))
    decider = Decider().of_trained(config)
    assert np.array_equal(
        decider.decisions(found, fitted.thresholds, ROWS), chosen.decisions(found, None, ROWS)
    )
    at_thresholds = decide(sigmoid(found["logits"]), fitted.thresholds)
    assert np.array_equal(decider.decisions(found, fitted.thresholds, OTHER_ROWS), at_thresholds)
    assert not np.array_equal(at_thresholds, chosen.decisions(found, None, ROWS))
    by_hand = Decider(given).of_trained(config)
    assert np.array_equal(by_hand.decisions(found, given, ROWS), decide(sigmoid(found["logits"]), given))
    assert Decider(given).report(found, "abcd", ROWS)[0].tuning is None


def test_what_is_reported_of_an_export():
    rng = np.random.default_rng(1)
    logits = rng.normal(-1, 1.5, (300, 4))
    found = {
        "logits": 3 * logits,
        "labels": (rng.random((300, 4)) < sigmoid(logits)).astype(np.uint8),
    }  # too sure
    fitted, metrics = Decider(calibration="temperature").report(found, "abcd", ROWS)
    assert fitted.calibrates
    assert metrics["eval_calibrated_ece"] < metrics["eval_ece"]
    assert metrics["eval_calibrated_binary_cross_entropy"] < metrics["eval_binary_cross_entropy"]
    assert [row["threshold"] for row in metrics["eval_per_label"]] == fitted.thresholds.tolist()
    plain, metrics = Decider().report(found, "abcd", ROWS)
    assert not plain.calibrates
    assert set(metrics) == {"eval_per_label", "eval_ece", "eval_tuned_folds"}


def test_thresholds_by_hand(tmp_path):
    path = tmp_path / "thresholds.json"
    path.write_text(json.dumps({"b=c": 0.7, "a": 1}), encoding="utf-8")
    assert fixed_thresholds(None, LABELS) is None
    assert fixed_thresholds(["0.3"], LABELS).tolist() == [0.3, 0.3, 0.3]
    assert fixed_thresholds(["0.3", "b=c=0.5", "标签=.25"], LABELS).tolist() == [0.3, 0.5, 0.25]
    assert fixed_thresholds(["0.3", str(path)], LABELS).tolist() == [1, 0.7, 0.3]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (["high"], "--threshold high: expected a number, LABEL=NUMBER, or a json file of labels and numbers"),
        (["0.5", "d=0.1"], "--threshold d=0.1: the model has no label 'd'; it has a, b=c, 标签"),
        (["30"], "--threshold 30: '30' for 'a', expected a number from 0 to 1"),
        (["nan"], "--threshold nan: 'nan' for 'a', expected a number from 0 to 1"),
        (["a=0.1"], "--threshold lacks 2 label(s): b=c, 标签; put a number for all other labels first"),
        (["missing.json"], "--threshold missing.json: "),
    ],
)
def test_thresholds_that_are_wrong(parts, said):
    with pytest.raises(InputError) as caught:
        fixed_thresholds(parts, LABELS)
    assert caught.value.problems[0].startswith(said)


def test_arguments_become_a_decider():
    asked = Arguments(
        output_dir="a",
        threshold=("recall_at_precision:0.9",),
        calibration="temperature",
    )
    validate(asked)
    assert make_decider(asked, LABELS) == Decider(
        None, Objective("recall_at_precision", 0.9), "temperature", 42
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"threshold": ("precision_at_recall",)}, "--threshold precision_at_recall needs a number above 0"),
        (
            {"threshold": ("precision_at_recall:2",)},
            "--threshold: is '2', expected a number above 0 and at most",
        ),
        ({"threshold": ("f1:0.5",)}, "--threshold: f1 has no 0.5"),
        ({"threshold": ("cost:3", "0.5")}, "--threshold cost:3 0.5: an objective stands alone"),
        ({"threshold": ("cost",), "do_eval": False}, "--threshold cost needs --do_train and --do_eval"),
        ({"calibration": "temperature", "do_eval": False}, "--calibration temperature needs --do_train and"),
        (
            {"calibration": "temperature", "lora_r": 4, "export": "adapter"},
            "--calibration temperature and --export adapter are both given",
        ),
    ],
)
def test_arguments_that_contradict_each_other(given, said):
    with pytest.raises(InputError) as caught:
        validate(Arguments(output_dir="runs/a", model_name_or_path="m", **given))
    assert any(said in problem for problem in caught.value.problems)
