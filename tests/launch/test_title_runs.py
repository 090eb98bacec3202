"""Title generation under launchers: what a run leaves, and resume. Launches are compared in tests/parity/."""

from __future__ import annotations

import pytest
from run_folders import read_json

from samerun.files import read_lines
from samerun.tools import diff


@pytest.mark.slow
def test_what_a_run_leaves(launched):
    folder = launched("titles").folder
    metrics = read_json(folder / "metrics.json")
    assert metrics["rouge_tokenizer"] == "characters"
    names = ("loss", "rouge1", "rouge2", "rougeL", "rougeLsum", "exact_match", "gen_len", "baseline_rougeL")
    for split in ("eval", "test"):
        assert {f"{split}_{name}" for name in names} <= metrics.keys()
    assert len(metrics["examples"]) == 10
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert metrics["examples"][0]["reference"] in card
    for name, values in diff.read_run(folder)["resampled"].items():
        assert values[0] == pytest.approx(metrics[f"test_{name}"], abs=1e-12)
    line = next(read_lines(folder / "predictions.jsonl"))
    assert len(line["candidates"]) == 2
    assert line["candidates"][0]["title"] == line["title"]
    assert line["candidates"][0]["score"] >= line["candidates"][1]["score"]
