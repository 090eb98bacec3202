import json
from pathlib import Path

import compare
import numpy as np
import pytest

from samerun.errors import InputError
from samerun.metrics.bootstrap import MeansOfRows, bootstrap


def finished(folder, seed=1, test=None, train_file="a.csv", loss=1.0):
    folder.mkdir()
    arguments = {"seed": seed, "output_dir": str(folder), "test_file": "test.csv", "train_file": train_file}
    run = {"arguments": arguments, "fingerprint": {"validation_content": "abc"}}
    metrics = {"eval_loss": loss, "test_accuracy": 0.5, "train_steps": 3, "eval_per_class": []}
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    events = [{"step": step, "epoch": 1.0, "loss": loss / step, "eval_loss": loss} for step in (1, 2)]
    (folder / "history.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in events), encoding="utf-8"
    )
    if test is not None:
        values = bootstrap(MeansOfRows({"accuracy": test}), len(test))
        np.savez(folder / "bootstrap_test.npz", rows=len(test), **values)
    return str(folder)


def test_runs_are_compared_by_metrics_arguments_and_rows(tmp_path, capsys):
    rng = np.random.default_rng(1)
    scores = (rng.random(400) < 0.6).astype(float)
    better = np.maximum(scores, rng.random(400) < 0.3)
    runs = [finished(tmp_path / "a", test=scores), finished(tmp_path / "b", seed=2, test=better, loss=0.5)]
    assert compare.main([*runs, "--plot", str(tmp_path / "curves.png")]) == 0
    said = capsys.readouterr().out
    assert "eval_loss                                   1.0000        0.5000" in said
    assert "  --seed: 1, 2" in said
    assert "--output_dir:" not in said
    assert "[1] minus [0], test rows, paired bootstrap" in said
    assert f"{better.mean() - scores.mean():+.4f}" in said
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_runs_that_scored_other_rows_are_not_compared_row_by_row(tmp_path, capsys):
    runs = [finished(tmp_path / "a", test=np.ones(3)), finished(tmp_path / "b", test=np.ones(4))]
    assert compare.main(runs) == 0
    assert "scored different rows" in capsys.readouterr().out


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    with pytest.raises(InputError, match="no finished run"):
        compare.read_run(tmp_path)
    assert compare.main([str(tmp_path)]) == 2
    assert "error:" in capsys.readouterr().err
    run = Path(finished(tmp_path / "cut"))
    (run / "bootstrap_test.npz").write_bytes(b"PK")
    with pytest.raises(InputError, match="no finished run"):
        compare.read_run(run)
