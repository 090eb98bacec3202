"""Metrics and predictions are the file's own: processes that share out the weights, without a training, find
those of the training's process."""

import pytest
from launchers import CLASSIFY, accelerate, as_words, run
from run_folders import read_json

from samerun.files import read_lines


@pytest.mark.slow
def test_a_trained_model_is_evaluated_alike_under_zero3(home, launched, tmp_path):
    trained = launched("python").folder
    given = as_words(model_name_or_path=trained / "best", per_device_eval_batch_size=3, report_to="none")
    files = as_words(validation_file="one.csv", test_file="test.csv", output_dir=tmp_path)
    modes = as_words(do_eval=True, do_predict=True)
    run([*accelerate("zero3.yaml", 2), str(CLASSIFY), *given, *files, *modes], home).check()
    ours, theirs = (read_json(folder / "metrics.json") for folder in (tmp_path, trained))
    assert ours["eval_loss"] > 0
    assert ours["eval_roc_auc_macro"] is None  # of one row
    names = [key for key in ours if key.startswith("test_") and not key.endswith(("per_second", "per_label"))]
    assert len(names) > 15
    assert {key: ours[key] for key in names} == pytest.approx({key: theirs[key] for key in names}, abs=1e-6)
    predictions = (read_lines(folder / "predictions.jsonl") for folder in (tmp_path, trained))
    for line, their in zip(*predictions, strict=True):
        assert (line["id"], line["labels"]) == (their["id"], their["labels"])
        assert line["probabilities"] == pytest.approx(their["probabilities"], rel=0, abs=2e-6)
