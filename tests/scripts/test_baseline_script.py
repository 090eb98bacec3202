"""`samerun baseline`, without a training."""

import json

from launchers import CLASSIFY, as_words

from samerun.tools import baseline
from samerun.tools.trials import write_lines


def test_the_simplest_method_is_scored_on_labelled_rows(tmp_path, monkeypatch, token_cache, capsys, refusal):
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"{'rain' if row % 2 else 'sun'} {row}", "labels": ["ab"[row % 2]]} for row in range(20)]
    for name, part in (("train", rows), ("valid", rows[:7]), ("test", [{"text": "sun"}])):
        write_lines(tmp_path / f"{name}.jsonl", part)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")
    files = {"train_file": "train.jsonl", "validation_file": "valid.jsonl", "test_file": "test.jsonl"}
    model = {"from_scratch": True, "config_name": "config.json", "tokenizer_type": "train", "vocab_size": 128}
    assert baseline.main([str(CLASSIFY), *as_words(**files, **model)]) == 0
    said = capsys.readouterr().out
    header, *lines = map(str.split, said.splitlines())
    assert header == ["baseline", "a", "linear", "model", "on", "TF-IDF"]
    assert lines[0] == ["results", "validation"]
    assert ["tuned_f1_macro", "1.0000"] in lines
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == {*files.values(), "config.json"}

    for name in ("train", "valid"):
        write_lines(tmp_path / f"{name}.jsonl", [row | {"text": "!" * 9} for row in rows])
    assert baseline.main([str(CLASSIFY), *as_words(**files, **model)]) == 0
    assert capsys.readouterr().out.splitlines() == [said.splitlines()[0]]  # no text has a word

    words = [str(CLASSIFY.with_name("segment3d.py")), "--train_file", "v"]
    assert "has no baseline" in refusal(baseline.main, words)
