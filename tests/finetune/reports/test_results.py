import json
import math

import numpy as np
import pytest
from linear_task import LinearTask, points, split_of

from finetune.reports import results


def test_predictions_are_lines_of_json(start_run, arguments, tmp_path):
    run, asked, task = start_run(), arguments(output_dir=str(tmp_path)), LinearTask()
    split = split_of(*points(2))
    results.write_predictions(run, asked, task, split, {"error": np.array([0.5, 1.0])})
    written = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == [{"id": 0, "error": 0.5}, {"id": 1, "error": 1.0}]
    object.__setattr__(split, "ids", ["一", 2])
    elsewhere = tmp_path / "other.jsonl"
    asked = arguments(output_dir=str(tmp_path), predictions_file=str(elsewhere))
    results.write_predictions(run, asked, task, split, {"error": np.array([0.5, 1.0])})
    assert "一" in elsewhere.read_text(encoding="utf-8")
    before = elsewhere.read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        results.write_predictions(run, asked, task, split, {"error": np.array([0.5, math.nan])})
    assert elsewhere.read_bytes() == before
