import json

from samerun.output import written
from samerun.output.run_folder import METRICS, begin_best, merge_metrics, read_metrics


def test_metrics_of_earlier_commands_are_kept(tmp_path):
    merge_metrics(tmp_path, {"eval_loss": 1.0, "train_loss": 2.0})
    merge_metrics(tmp_path, {"eval_loss": 0.5, "test_loss": None})
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        "eval_loss": 0.5,
        "train_loss": 2.0,
        "test_loss": None,
    }


def test_a_new_best_model_removes_what_belongs_to_another(tmp_path):
    of_old = {
        "eval_f1": 0.5,
        "test_f1": 0.4,
        "best_metric": 0.5,
        "exported": "average",
        "average_metric": 0.5,
    }
    merge_metrics(tmp_path, {**of_old, "best_step": 3, "train_loss": 0.1})
    kept = {"best_step": 3, "train_loss": 0.1}
    for name in ("predictions.jsonl", "mine.jsonl", "predictions/mask.png", "validation_predictions.npz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    written.add(tmp_path, *(tmp_path / name for name in ("predictions.jsonl", "predictions/mask.png")))
    written.add(tmp_path, tmp_path / "validation_predictions.npz")

    begin_best(tmp_path, 3)  # the same one, as after a resume from its checkpoint
    assert read_metrics(tmp_path / METRICS) == {**of_old, **kept}
    assert (tmp_path / "predictions.jsonl").exists()
    begin_best(tmp_path, 6)
    assert read_metrics(tmp_path / METRICS) == {**kept, "best_step": 6}
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.json", "mine.jsonl", ".written.json"}
