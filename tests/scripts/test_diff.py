import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score, matthews_corrcoef

from samerun.errors import InputError
from samerun.files import write_json
from samerun.text.multi_label_scores import decision_scores, ranking_scores
from samerun.tools import diff
from samerun.tools.trials import write_lines


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(diff, "RESAMPLES", 200)


def of_classes(right):
    """Lines of predictions.jsonl for two classes. `right`: whether each row's is right."""
    return [
        {"id": row, "label": "a" if good else "b", "probabilities": {"a": 0.5, "b": 0.5}, "reference": "a"}
        for row, good in enumerate(right)
    ]


def finished(folder, lines=(), loss=1.0, facts=None, **given):
    """`facts`: of run.json; `given`: arguments."""
    folder.mkdir()
    metrics = {"eval_loss": loss, "test_accuracy": 0.5, "train_steps": 3, "eval_per_class": []}
    write_json(folder / "run.json", {"arguments": {"output_dir": str(folder), **given}, **(facts or {})})
    write_json(folder / "metrics.json", metrics)
    events = [{"step": step, "epoch": 1.0, "loss": loss / step, "eval_loss": loss} for step in (1, 2)]
    write_lines(folder / "history.jsonl", events)
    write_lines(folder / "predictions.jsonl", lines)
    return str(folder)


def test_runs_are_compared_by_metrics_arguments_and_rows(tmp_path, capsys):
    rng = np.random.default_rng(1)
    right = rng.random(400) < 0.6
    better = right | (rng.random(400) < 0.3)
    runs = [
        finished(tmp_path / "a", of_classes(right), seed=1),
        finished(tmp_path / "b", of_classes(better), seed=2, loss=0.5),
    ]
    assert diff.main(runs) == 0
    said = capsys.readouterr().out
    assert "eval_loss                                   1.0000        0.5000" in said
    assert "  --seed: 1, 2" in said
    assert "--output_dir:" not in said
    assert f"[0] 400 rows of predictions.jsonl, bootstrap\n  accuracy{right.mean():>36.4f}   95 % 0.5" in said
    assert "[1] minus [0], the same rows, paired bootstrap" in said
    assert f"{better.mean() - right.mean():.4f}" in said


def test_the_first_step_and_the_facts_that_differ_are_named(tmp_path, capsys):
    runs = []
    for number, loss in enumerate((1.0, 1 + 5e-6, 1.001)):
        facts = {"versions": {"torch": "2.13"}, "fingerprint": {"label_list": ["a", "b"][: 2 - number // 2]}}
        facts["launcher_process"] = number
        runs.append(finished(tmp_path / str(number), loss=loss, facts=facts))
    assert diff.main(runs) == 0
    said = capsys.readouterr().out
    assert "[1] and [0], first step that differs: none among 2 logged steps" in said
    assert "[2] and [0], first step that differs: step 1: loss 1.001 against 1\n" in said
    assert "labels that differ\n  fingerprint.label_list: ['a', 'b'], ['a', 'b'], ['a']\n\n" in said
    assert "cannot be compared" not in said
    others = [
        finished(tmp_path / name, facts={"fingerprint": {"validation_content": name}}) for name in ("v", "w")
    ]
    (tmp_path / "v" / "predictions_of_mine.jsonl").write_text('{"label": "a"}\n')
    assert diff.main(others) == 0
    assert "eval_* and best_*: of other validation rows; they cannot be compared" in capsys.readouterr().out
    many = [finished(tmp_path / f"of {n}", facts={"list": ["label"] * n}) for n in (100, 200)]
    assert diff.main(many) == 0
    assert re.search(r"  list: 100 entries \(\w{6}\), 200 entries \(\w{6}\)\n", capsys.readouterr().out)


def test_runs_that_predicted_other_rows_are_not_compared_row_by_row(tmp_path, capsys):
    rows = of_classes([True] * 3)
    runs = [
        finished(tmp_path / "a", rows),
        finished(tmp_path / "more", of_classes([True] * 4)),
        finished(tmp_path / "other", [*rows[:2], {**rows[2], "reference": "b"}]),
        finished(tmp_path / "unlabelled", [{"id": 1, "label": "a"}]),
        finished(tmp_path / "none"),
    ]
    assert diff.main(runs) == 0
    assert re.findall(r"\[(\d)\] and \[0\] predicted different rows", capsys.readouterr().out) == [*"1234"]


def test_the_order_of_labels_and_rows_without_labels_elsewhere_do_not_matter(tmp_path, capsys):
    lines = [
        {"id": row, "labels": [], "probabilities": {"a": 0.2, "b": 0.9}, "reference": ["a", "b"]}
        for row in range(3)
    ]
    turned = [{**line, "reference": ["b", "a"]} for line in reversed(lines)]
    runs = [finished(tmp_path / "a", lines), finished(tmp_path / "b", [{"id": 1, "labels": []}])]
    write_lines(tmp_path / "b" / "predictions_test.jsonl", turned)
    assert diff.main(runs) == 0
    said = capsys.readouterr().out
    assert (
        "[1] 3 rows of predictions_test.jsonl, bootstrap (too few for these intervals and p values)" in said
    )
    assert "[1] minus [0], the same rows, paired bootstrap" in said


def test_rare_labels_that_are_not_drawn_do_not_pull_the_mean_down():
    lines = [
        {
            "labels": [f"l{row}"],
            "probabilities": {f"l{n}": float(n == row) for n in range(30)},
            "reference": [f"l{row}"],
        }
        for row in range(30)
    ]
    values = diff.bootstrap(diff.scores_of_labels(lines), 30)
    assert set(values["f1_macro"]) == {1.0}
    likeliest = [{**line, "probabilities": dict.fromkeys(line["labels"], 1.0)} for line in lines]
    found = diff.bootstrap(diff.scores_of_labels(likeliest), 30)
    assert set(found) == {"f1_micro", "tuned_f1_micro"}  # other labels are not known


def test_a_folder_without_a_run_is_named(tmp_path, refusal):
    with pytest.raises(InputError, match="no finished run"):
        diff.read_run(tmp_path)
    assert "error:" in refusal(diff.main, [str(tmp_path)])
    run = Path(finished(tmp_path / "cut"))
    (run / "predictions.jsonl").write_text('{"id": 1, "la')
    with pytest.raises(InputError, match="no finished run"):
        diff.read_run(run)


def test_scores_of_resampled_labels_are_those_of_a_file_with_these_rows():
    rng = np.random.default_rng(0)
    probabilities, targets = rng.integers(0, 8, (60, 3)) / 8, rng.random((60, 3)) < 0.2  # many ties
    tuned = probabilities >= 0.3
    lines = [
        {
            "probabilities": dict(zip("abc", chances.tolist(), strict=True)),
            "labels": [name for name, chosen in zip("abc", given, strict=True) if chosen],
            "reference": [name for name, chosen in zip("abc", true, strict=True) if chosen],
        }
        for chances, given, true in zip(probabilities, tuned, targets, strict=True)
    ]
    scores = diff.scores_of_labels(lines)
    for rows in (np.arange(60), rng.integers(60, size=60), np.array([3, 3])):
        expected = ranking_scores(probabilities[rows], targets[rows])
        expected |= decision_scores(probabilities[rows] >= 0.5, targets[rows])
        at_thresholds = decision_scores(tuned[rows], targets[rows])
        expected |= {f"tuned_{name}": score for name, score in at_thresholds.items()}
        for prefix, given in (("", probabilities >= 0.5), ("tuned_", tuned)):
            # Without the labels whose rows were not drawn.
            drawn = [label for label in range(3) if targets[rows, label].any()]
            by_label = [f1_score(targets[rows, label], given[rows, label]) for label in drawn]
            expected[f"{prefix}f1_macro"] = np.mean(by_label) if drawn else np.nan
        expected["average_precision_micro"] = expected["average_precision_micro"] or np.nan
        assert scores(rows) == {
            name: pytest.approx(expected[name], nan_ok=True, abs=1e-12) for name in scores(rows)
        }


def test_titles_and_masks_are_scored():
    lines = [{"title": "a b", "reference": "a b"}, {"title": "c", "reference": "d e"}]
    values = diff.resample(lines, "default")
    assert (values["rouge1"][0], values["exact_match"][0]) == (0.5, 0.5)
    masks = [{"iou": {"sky": 1.0, "sea": None}}, {"iou": {"sky": 0.5, "sea": 0.25}}]
    masks = [{"image": name, **mask} for name, mask in zip("ab", masks, strict=True)]
    assert diff.resample(masks, None)["iou of an image"][0] == (0.75 + 0.25) / 2
    volumes = [{"image": "a", "dice": {"liver": 0.5}, "iou": {"liver": 0.3}, "hd95": {"liver": None}}]
    found = {name: each[0] for name, each in diff.resample(volumes, None).items()}
    assert found == {"mean_dice": 0.5, "mean_iou": 0.3}  # a distance is undefined


def test_r2_is_undefined_for_one_value_only():
    scores = diff.scores_of_numbers(np.array([[1.0], [2.0], [3.0]]), np.array([[0.1], [0.1], [0.1]]))
    assert np.isnan(scores(np.arange(3))["r2"])
    assert scores(np.arange(3))["mae"] == pytest.approx(1.9)
    scores = diff.scores_of_numbers(np.array([[1.0], [3.0], [2.0]]), np.array([[1.0], [2.0], [3.0]]))
    found = scores(np.arange(3))
    assert (found["pearson"], found["spearman"]) == pytest.approx((0.5, 0.5))


def test_classes_are_scored():
    lines = [{"label": found, "reference": true} for found, true in ("aa", "ab", "bb", "cc")]
    scores = diff.scores_of_classes(lines)(np.arange(4))
    assert scores["accuracy"] == 0.75
    assert scores["matthews_correlation"] == pytest.approx(matthews_corrcoef(list("abbc"), list("aabc")))


def resampled(scores):
    return diff.bootstrap(lambda rows: {"score": scores[rows].mean()}, len(scores), 0)["score"]


def test_a_metric_that_is_undefined_in_some_resamples_has_an_interval_from_the_others():
    assert diff.interval(np.array([0.5, np.nan, 0.5, 0.5])) == (0.5, 0.5)
    assert np.isnan(diff.interval(np.full(3, np.nan))).all()


def test_a_difference_that_may_be_chance_has_a_large_p_and_an_interval_with_zero():
    rng = np.random.default_rng(2)
    scores = rng.normal(size=300)
    same = diff.paired_difference(resampled(scores + 0.1 * rng.normal(size=300)), resampled(scores))
    better = diff.paired_difference(resampled(scores + 0.1), resampled(scores))
    assert same[1] < 0 < same[2]
    assert same[3] > 0.05
    assert better[0] == pytest.approx(0.1)
    assert better[1] > 0
    assert better[3] < 0.01
