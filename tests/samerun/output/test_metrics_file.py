import json

from samerun.output.run_folder import merge_metrics


def test_metrics_of_earlier_commands_are_kept(tmp_path):
    merge_metrics(tmp_path, {"eval_loss": 1.0, "train_loss": 2.0})
    merge_metrics(tmp_path, {"eval_loss": 0.5, "test_loss": None})
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        "eval_loss": 0.5,
        "train_loss": 2.0,
        "test_loss": None,
    }
