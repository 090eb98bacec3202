import json
import math

import pytest

from finetune.reports import results


def test_metrics_of_earlier_commands_are_kept(tmp_path):
    results.merge_metrics(tmp_path, {"eval_loss": 1.0, "train_loss": 2.0})
    results.merge_metrics(tmp_path, {"eval_loss": 0.5, "test_loss": None})
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"eval_loss": 0.5, "train_loss": 2.0, "test_loss": None}


def test_predictions_are_lines_of_json(start_run, arguments, tmp_path):
    run, lines = start_run(), [{"id": "一", "p": 0.5}, {"id": 2, "p": 1.0}]
    results.write_predictions(run, arguments(output_dir=str(tmp_path)), lambda: lines)
    written = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == lines
    assert "一" in written[0]
    elsewhere = tmp_path / "other.jsonl"
    results.write_predictions(run, arguments(output_dir=str(tmp_path), predictions_file=str(elsewhere)), lambda: lines[:1])
    assert len(elsewhere.read_text().splitlines()) == 1
    with pytest.raises(ValueError, match="JSON compliant"):
        results.write_predictions(run, arguments(output_dir=str(tmp_path)), lambda: [{"p": math.nan}])
    assert len((tmp_path / "predictions.jsonl").read_text().splitlines()) == 2
