"""Metrics and predictions are the file's own: no number of processes, batch size or padding changes them."""

import csv

import pytest
from launchers import CLASSIFY, LABELS, TEST_ROWS, accelerate, as_words, run, torchrun
from run_folders import read_json

from samerun.files import read_lines


@pytest.mark.slow
def test_metrics_and_predictions_do_not_depend_on_how_they_are_computed(
    home, launched, script, monkeypatch, tmp_path
):
    """The model of the job "python", on a validation file of one row and on a test file with labels."""
    model = launched("python").folder / "best"
    monkeypatch.chdir(home)

    def evaluated(name, size, launcher=None):
        folder = tmp_path / name
        files = as_words(validation_file="one.csv", test_file="test.csv", output_dir=folder)
        modes = as_words(do_eval=True, do_predict=True, per_device_eval_batch_size=size, report_to="none")
        command = ["--model_name_or_path", str(model), *files, *modes]
        if launcher is None:
            assert script("classify", command).code == 0
        else:
            run([*launcher, str(CLASSIFY), *command], home).check()
        return read_json(folder / "metrics.json"), list(read_lines(folder / "predictions.jsonl"))

    metrics, lines = evaluated("one_process", 1)
    assert metrics["eval_loss"] > 0
    assert metrics["eval_roc_auc_macro"] is None  # of one row
    assert metrics["test_rows"] == TEST_ROWS
    assert 0 < metrics["test_roc_auc_macro"] < 1
    assert metrics["test_tuned_f1_micro"] > 0
    with (home / "test.csv").open(newline="", encoding="utf-8") as file:
        assert [line["id"] for line in lines] == [row["id"] for row in csv.DictReader(file)]
    scores = {
        key: value
        for key, value in metrics.items()
        if key.startswith(("eval_", "test_")) and not key.endswith(("per_second", "per_label"))
    }
    assert len(scores) > 30
    for name, size, launcher in (
        ("two_processes", 7, torchrun(2)),
        ("two_processes_under_a_deepspeed_config", 64, accelerate("zero3.yaml", 2)),
    ):
        theirs, their_lines = evaluated(name, size, launcher)
        assert theirs.keys() == metrics.keys()
        for key, value in scores.items():
            assert theirs[key] == (None if value is None else pytest.approx(value, rel=0, abs=1e-6)), key
        for line, their in zip(lines, their_lines, strict=True):
            assert (their["id"], their["labels"]) == (line["id"], line["labels"])
            assert their["probabilities"].keys() == set(LABELS)
            assert their["probabilities"] == pytest.approx(line["probabilities"], rel=0, abs=2e-6)
