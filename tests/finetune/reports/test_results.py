import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from linear_task import LinearTask, points, split_of

from finetune.errors import InputError
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


class Hub:
    """As much of the hub as is used; it fails from the call `failing` on."""

    def __init__(self, failing=None):
        self.failing, self.called = failing, []

    def __getattr__(self, call):
        def answer(*given, **settings):
            self.called.append((call, settings))
            if call == self.failing:
                raise OSError("403 Forbidden\nmore")
            return SimpleNamespace(repo_id=f"me/{given[0]}" if given else None)

        return answer


@pytest.mark.parametrize("failing", [None, "create_repo", "auth_check", "upload_folder", "upload_file"])
def test_the_hub_is_asked_before_the_training_and_a_failed_upload_ends_no_run(
    start_run, arguments, tmp_path, monkeypatch, capsys, failing
):
    hub = Hub(failing)
    monkeypatch.setattr(results, "HfApi", lambda: hub)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "README.md").touch()
    asked = arguments(output_dir=str(folder), push_to_hub=True, hub_private_repo=True)
    if failing in ("create_repo", "auth_check"):
        with pytest.raises(InputError, match=r"--push_to_hub: cannot write to mine on the hub \(403 Forbidden\); log in"):
            results.check_upload(asked)
    else:
        results.check_upload(asked)
        assert [call for call, _ in hub.called] == ["create_repo", "auth_check"]
        assert hub.called[0][1] == {"private": True, "exist_ok": True}
        results.push_to_hub(start_run(), asked)
        failed = f"note           the upload failed (403 Forbidden); repeat it: hf upload mine {folder / 'best'}\n"
        assert capsys.readouterr().out == (failed if failing else "uploaded       me/mine\n")


def test_a_table_has_the_metrics_that_are_known(capsys):
    metrics = {
        "train_loss": 1.0,
        "eval_loss": 0.5,
        "eval_f1_micro": None,
        "test_loss": 0.25,
        "test_f1_micro": 0.75,
        "test_rows": 3,
    }
    assert results.table(results.by_split(metrics), ("loss", "f1_micro", "accuracy")) == [
        "results                    validation        test",
        "               loss            0.5000      0.2500",
        "               f1_micro             -      0.7500",
    ]
    assert results.table(results.by_split({"train_loss": 1.0, "test_rows": 3}), ("loss",)) == []
