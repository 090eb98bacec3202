"""Unusual sentences that are right train. Those that must be rejected are in the catalogue."""

from __future__ import annotations

import json

import pytest
from catalogue_case import command_line, lay_out
from refused_tags import case, rows

from samerun.files import read_lines

UNUSUAL = {
    "sentences without words or names, words without tokens": (
        rows((["a", "\u200b"], ["B-X", "O"]), ([], []), (["b"], ["O"]), (["c" * 300, "d"], ["B-X", "I-X"])),
        "1 row(s) without a text left out",
    ),
    "IOB1": (rows((["a", "b", "c"], ["I-X", "I-X", "B-X"]), (["d"], ["I-X"])), "IOB1 tags, read as IOB2"),
    "BILOU": (rows((["a", "b", "c"], ["B-X", "I-X", "L-X"]), (["d"], ["U-X"])), "BILOU tags, read as IOB2"),
    "word classes": (rows((["a", "b"], ["NOUN", "VERB"]), (["c"], ["NOUN"])), "2 tags: NOUN, VERB"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_sentences_are_trained_on_and_tagged(name, workplace, script):
    files, said = UNUSUAL[name]
    test = "".join(json.dumps({"tokens": words}) + "\n" for words in (["a", "b"], "ab c.", [], "北京"))
    sentences = case(name, [], files | {"test.jsonl": test}, {
        "do_train": "true", "do_predict": "true", "test_file": "test.jsonl", "validation_file": "train.jsonl",
        "max_length": 8,
    })  # fmt: skip
    lay_out(sentences, "tag", workplace)
    ended = script("tag", command_line(sentences, "tag"))
    assert (ended.code, ended.err) == (0, "")
    assert said in ended.out
    predicted = list(read_lines(workplace / "run" / "predictions.jsonl"))
    assert [line["tokens"] for line in predicted] == [["a", "b"], ["ab", "c", "."], [], ["北", "京"]]
    assert all(len(line["tags"]) == len(line["tokens"]) for line in predicted)
