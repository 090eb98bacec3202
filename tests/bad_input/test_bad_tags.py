"""Bad sentences and tags end in one message with file, row and word; unusual ones that are right train."""

from __future__ import annotations

import json
import re

import pytest
import refused_tags
from catalogue_case import check_one_message, contents
from refused_tags import GOOD, Case, command_line, lay_out, rows


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in refused_tags.CASES])
def test_bad_tags_are_explained_and_nothing_is_harmed(case: Case, workplace, script):
    lay_out(case, workplace)
    before = contents(workplace)

    ended = script("tag", command_line(case))

    for words in case.said:
        assert re.search(words, ended.err, re.MULTILINE), ended.err
    assert (ended.code, ended.out) == (2, "")
    check_one_message(ended)
    after = {
        name: digest
        for name, digest in contents(workplace).items()
        if not name.startswith(("run/", "cache/"))
    }
    assert after == before


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
    case = Case(name, [], files | {"test.jsonl": test}, {
        "do_train": "true", "do_predict": "true", "test_file": "test.jsonl", "validation_file": "train.jsonl",
        "max_length": 8,
    })  # fmt: skip
    lay_out(case, workplace)
    ended = script("tag", command_line(case))
    assert (ended.code, ended.err) == (0, "")
    assert said in ended.out
    predicted = [
        json.loads(line) for line in (workplace / "run" / "predictions.jsonl").read_text().splitlines()
    ]
    assert [line["tokens"] for line in predicted] == [["a", "b"], ["ab", "c", "."], [], ["北", "京"]]
    assert all(len(line["tags"]) == len(line["tokens"]) for line in predicted)


def test_the_catalogue_of_tags_is_large():
    assert len({case.name for case in refused_tags.CASES}) == len(refused_tags.CASES) >= 25
    assert GOOD.count("\n") == 3
