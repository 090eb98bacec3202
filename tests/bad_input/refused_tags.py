"""Sentences with tags that must be rejected, and unusual ones that must work."""

from catalogue_case import SENTENCES, Case, Content, lines


def case(name: str, said: list[str], files: dict | None = None, arguments: dict | None = None) -> Case:
    return Case(name, said, "tag", arguments or {}, files or {})


def rows(*pairs: tuple[object, object]) -> dict[str, Content]:
    """A training file of these (tokens, tags)."""
    return {"train.jsonl": lines(*({"tokens": words, "tags": tags} for words, tags in pairs))}


def conll(text: str) -> dict[str, dict]:
    return {"files": {"train.conll": text}, "arguments": {"train_file": "train.conll"}}


AB = (["a", "b"], ["B-X", "I-X"])
CASES = [
    case("words as a text", [r"train\.jsonl:2: tokens is 'a b' \(str\), expected a list of words"],
         rows(AB, ("a b", ["O", "O"]))),
    case("a list written as a text in a csv file", [r"train\.csv:2: tokens is .* list of words; use a jsonl"],
         {"train.csv": "tokens,tags\n\"['a', 'b']\",\"['O', 'O']\"\n"}, {"train_file": "train.csv"}),
    case("a word that is a number", [r"train\.jsonl:1: tokens: word 2 is 7 \(int\), expected a text"],
         rows((["a", 7], ["O", "O"]))),
    case("blank words", [r"word 1 is ' '; a word is no space", r"word 2 is 'a\\nb'"],
         rows(([" ", "a\nb"], ["O", "O"]))),
    case("fewer tags than words", [r"train\.jsonl:2: tags: 1 tag\(s\) for 2 word\(s\); each word needs one"],
         rows(AB, (["a", "b"], ["O"]))),
    case("tags as a text", [r"train\.jsonl:1: tags is 'B-X I-X' \(str\), expected a list"],
         rows((["a", "b"], "B-X I-X"))),
    case("numbers without names", [r"train\.jsonl:1: tags: numbers, whose names are unknown; .*ClassLabel"],
         rows((["a", "b"], [0, 1]))),
    case("a word without a tag", [r"train\.jsonl:1: tags: word 2, 'b', has the tag None, expected a name"],
         rows((["a", "b"], ["O", None]))),
    case("an I- that follows nothing", [r"train\.jsonl:2: tags: word 2, 'd': I-X follows nothing"],
         rows(AB, (["c", "d"], ["O", "I-X"]))),
    case("BILOU without an end", [r"train\.jsonl:2: tags: word 1, 'c': B-X is no last word"],
         rows((["a", "b"], ["B-X", "L-X"]), (["c", "d"], ["B-X", "O"]))),
    case("a B- alone in IOB1", [r"train\.jsonl:3: tags: word 2, 'd': B-X follows no X; in IOB1"],
         rows(*[(["a", "b", "c"], ["I-X", "I-X", "B-X"])] * 2, (["c", "d"], ["O", "B-X"]))),
    case("IOBES without a beginning", [r"train\.jsonl:2: tags: word 2, 'd': E-X follows nothing"],
         rows((["a", "b"], ["B-X", "E-X"]), (["c", "d"], ["O", "E-X"]))),
    case("a type without a prefix", [r"train\.jsonl:2: tags: word 1, 'c': 'X' has no B- or I- before it"],
         rows(AB, (["c", "d"], ["X", "O"]))),
    case("no tag but O", [r"no training word has a tag; name the tags with --label_file"],
         rows((["a", "b"], ["O", "O"]))),
    case("a tag that training lacks",
         [r"valid\.jsonl:2: word 1, 'Ben': the tag 'B-ORG' is not in the training data \(1 word"],
         {"valid.jsonl": SENTENCES.replace('["B-PER", "O"]', '["B-ORG", "O"]')}),
    case("CoNLL with a wrong tag", [r"train\.conll:4: tags: word 2, 'd': I-X follows nothing"],
         **conll("a B-X\nb I-X\n\nc O\nd I-X\n")),
    case("CoNLL without tags", [r"train\.conll: has one column; expected a word and, behind a space or tab"],
         **conll("a\nb\n\nc\n")),
    case("CoNLL with a short line", [r"train\.conll:2: 1 column\(s\), expected 2 as in the first line"],
         **conll("a O\nb\n\nc O\n")),
    case("CoNLL with ids", [r"test\.conll: has words and tags alone, no column 'nr'; use a jsonl file"],
         {"test.conll": "a O\n"}, {"do_train": "true", "do_predict": "true", "test_file": "test.conll",
                                      "id_column": "nr"}),
    case("a model of another kind", [r"models/titles: the model \(encoder-decoder\) cannot tag words; name"],
         {}, {"config_name": "models/titles"}),
]  # fmt: skip

# Training files that must work, and what the run says of them.
UNUSUAL = {
    "sentences without words or names, words without tokens": (
        rows((["a", "\u200b"], ["B-X", "O"]), ([], []), (["b"], ["O"]), (["c" * 300, "d"], ["B-X", "I-X"])),
        "1 row(s) without a text left out",
    ),
    "IOB1": (rows((["a", "b", "c"], ["I-X", "I-X", "B-X"]), (["d"], ["I-X"])), "IOB1 tags, read as IOB2"),
    "BILOU": (
        rows((["a", "b", "c"], ["B-X", "I-X", "L-X"]), (["d"], ["U-X"])),
        "BILOU, IOBES or BMES tags, read as IOB2",
    ),
    "word classes": (rows((["a", "b"], ["NOUN", "VERB"]), (["c"], ["NOUN"])), "2 tags: NOUN, VERB"),
}
