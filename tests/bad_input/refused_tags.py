"""Sentences with tags that must be rejected. Every case changes files or arguments of a valid command."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from catalogue_case import Content, as_bytes, lines, parquet

GOOD = lines(
    {"tokens": ["Anna", "lives", "in", "New", "York"], "tags": ["B-PER", "O", "O", "B-LOC", "I-LOC"]},
    {"tokens": ["Ben", "sleeps"], "tags": ["B-PER", "O"]},
    {"tokens": ["It", "rains"], "tags": ["O", "O"]},
)


@dataclass(frozen=True)
class Case:
    """`said`: patterns that the message must match; `files`, `arguments`: changes of the valid ones."""

    name: str
    said: list[str]
    files: dict[str, Content] = field(default_factory=dict)
    arguments: dict[str, object] = field(default_factory=dict)


def lay_out(case: Case, folder: Path) -> None:
    for name, content in ({"train.jsonl": GOOD, "valid.jsonl": GOOD} | case.files).items():
        (folder / name).write_bytes(as_bytes(content, "tags"))


def command_line(case: Case) -> list[str]:
    values = {
        "from_scratch": "true",
        "config_name": "models/config",
        "tokenizer_type": "train",
        "vocab_size": 128,
        "train_file": "train.jsonl",
        "validation_file": "valid.jsonl",
        "global_batch_size": 2,
        "max_steps": 1,
        "report_to": "none",
        "output_dir": "run",
    }
    return [f"--{name}={value}" for name, value in (values | case.arguments).items() if value is not None]


def rows(*pairs: tuple[object, object]) -> dict[str, Content]:
    """A training file of these (tokens, tags)."""
    return {"train.jsonl": lines(*({"tokens": words, "tags": tags} for words, tags in pairs))}


def conll(text: str) -> dict[str, dict]:
    return {"files": {"train.conll": text}, "arguments": {"train_file": "train.conll"}}


AB = (["a", "b"], ["B-X", "I-X"])
CASES = [
    Case("words as a text", [r"train\.jsonl:2: tokens is 'a b' \(str\), expected a list of words"],
         rows(AB, ("a b", ["O", "O"]))),
    Case("a list written as a text in a csv file", [r"train\.csv:2: tokens is .* list of words; use a jsonl"],
         {"train.csv": "tokens,tags\n\"['a', 'b']\",\"['O', 'O']\"\n"}, {"train_file": "train.csv"}),
    Case("no words", [r"train\.jsonl:1: tokens is missing, expected a list of words"], rows((None, ["O"]))),
    Case("a word that is a number", [r"train\.jsonl:1: tokens: word 2 is 7 \(int\), expected a text"],
         rows((["a", 7], ["O", "O"]))),
    Case("blank words", [r"word 1 is ' '; a word is no space", r"word 2 is 'a\\nb'"],
         rows(([" ", "a\nb"], ["O", "O"]))),
    Case("fewer tags than words", [r"train\.jsonl:2: tags: 1 tag\(s\) for 2 word\(s\); each word needs one"],
         rows(AB, (["a", "b"], ["O"]))),
    Case("more tags than words, in two rows",
         [r"train\.jsonl:1: tags: 3 tag\(s\) for 2", r"train\.jsonl:2: tags: 2 tag\(s\) for 1"],
         rows((["a", "b"], ["O"] * 3), (["a"], ["O"] * 2))),
    Case("no tags", [r"train\.jsonl:2: tags is missing, expected a list with a tag for each word"],
         rows(AB, (["a"], None))),
    Case("tags as a text", [r"train\.jsonl:1: tags is 'B-X I-X' \(str\), expected a list"],
         rows((["a", "b"], "B-X I-X"))),
    Case("numbers without names", [r"train\.jsonl:1: tags: numbers, whose names are unknown; .*ClassLabel"],
         rows((["a", "b"], [0, 1]))),
    Case("numbers without names in a parquet file", [r"train\.parquet row 1: tags: numbers, whose names"],
         {"train.parquet": parquet(tokens=[["a"]], TARGET=[[3]])}, {"train_file": "train.parquet"}),
    Case("a word without a tag", [r"train\.jsonl:1: tags: word 2, 'b', has the tag None, expected a name"],
         rows((["a", "b"], ["O", None]))),
    Case("an I- that follows nothing", [r"train\.jsonl:2: tags: word 2, 'd': I-X follows nothing"],
         rows(AB, (["c", "d"], ["O", "I-X"]))),
    Case("an I- of another type", [r"train\.jsonl:2: tags: word 2, 'd': I-X follows nothing"],
         rows(AB, (["c", "d"], ["B-Y", "I-X"]))),
    Case("many of them", [r"\.\.\. and 10 more"], rows(*[AB] * 40, *[(["c", "d"], ["O", "I-X"])] * 30)),
    Case("BILOU without an end", [r"train\.jsonl:2: tags: word 1, 'c': B-X is no last word"],
         rows((["a", "b"], ["B-X", "L-X"]), (["c", "d"], ["B-X", "O"]))),
    Case("a type without a prefix", [r"train\.jsonl:2: tags: word 1, 'c': 'X' has no B- or I- before it"],
         rows(AB, (["c", "d"], ["X", "O"]))),
    Case("no tag but O", [r"no training word has a tag; name the tags with --label_file"],
         rows((["a", "b"], ["O", "O"]))),
    Case("a tag that training lacks",
         [r"valid\.jsonl:2: word 1, 'Ben': the tag 'B-ORG' is not in the training data \(1 word"],
         {"valid.jsonl": GOOD.replace('["B-PER", "O"]', '["B-ORG", "O"]')}),
    Case("a tag misspelt", [r"the tag 'B-PRE' is not in the training data .*did you mean 'B-PER'"],
         {"valid.jsonl": GOOD.replace('["B-PER", "O"]', '["B-PRE", "O"]')}),
    Case("a tag that --label_file lacks", [r"the tag 'B-LOC' is not in the --label_file labels\.txt"],
         {"labels.txt": "O\nB-PER\nI-PER\n"}, {"label_file": "labels.txt"}),
    Case("no such column", [r"field 'tags' not found; found: tokens, ner_tags; .*did you mean"],
         {"train.jsonl": GOOD.replace('"tags"', '"ner_tags"')}),
    Case("words and tags from one column", [r"column 'tokens' is used twice"], {}, {"tags_column": "tokens"}),
    Case("unknown metric", [r"--metric_for_best_model f1_PERSON: no such metric; did you mean f1_PER"],
         {}, {"metric_for_best_model": "f1_PERSON"}),
    Case("CoNLL without tags", [r"train\.conll: has one column; expected a word and, behind a space or tab"],
         **conll("a\nb\n\nc\n")),
    Case("CoNLL with a short line", [r"train\.conll:2: 1 column\(s\), expected 2 as in the first line"],
         **conll("a O\nb\n\nc O\n")),
    Case("CoNLL with a wrong tag", [r"train\.conll:4: tags: word 2, 'd': I-X follows nothing"],
         **conll("a B-X\nb I-X\n\nc O\nd I-X\n")),
    Case("CoNLL of blank lines", [r"train\.conll: no rows: only blank lines"], **conll("\n\n")),
    Case("CoNLL with ids", [r"test\.conll: has words and tags alone, no column 'nr'; use a jsonl file"],
         {"test.conll": "a O\n"}, {"do_train": "true", "do_predict": "true", "test_file": "test.conll",
                                      "id_column": "nr"}),
    Case("a model of another kind", [r"models/titles: the model \(encoder-decoder\) cannot tag words; name"],
         {}, {"config_name": "models/titles"}),
]  # fmt: skip
