"""Tagging schemes, sentences in windows, and scores of names."""

import json

import numpy as np
import pytest
import torch
from seqeval.metrics import f1_score
from tokenizers.pre_tokenizers import ByteLevel
from transformers import RobertaTokenizer

from samerun.data.tables import read_table
from samerun.data.tokens import Ragged
from samerun.text import tags
from samerun.text.tags import PADDING, RAW, SPECIAL, SentenceWindows
from samerun.text.tokenizer import train_tokenizer

COLUMNS = ("tokens", "tags")
IOB2 = ("B-X", "I-X", "I-X", "O", "B-X", "B-X", "B-Y")
SAME = {
    "IOB2": IOB2,
    "IOB1": ("I-X", "I-X", "I-X", "O", "I-X", "B-X", "I-Y"),
    "BILOU": ("B-X", "I-X", "L-X", "O", "U-X", "U-X", "U-Y"),
    "IOBES": ("B-X", "I-X", "E-X", "O", "S-X", "S-X", "S-Y"),
    "BMES": ("B-X", "M-X", "E-X", "O", "S-X", "S-X", "S-Y"),
}


def read(path, rows, takes_texts=False):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tags.as_sentences(
        read_table(str(path), required=("tokens",), optional=("tags",)), *COLUMNS, takes_texts
    )


def row(found):
    return {"tokens": [f"w{number}" for number in range(len(found))], "tags": list(found)}


@pytest.mark.parametrize("scheme", SAME)
def test_every_scheme_becomes_iob2(scheme, tmp_path, token_cache):
    notes = []
    tagged = tags.read_tags(read(tmp_path / "a.jsonl", [row(SAME[scheme]), row(["O"])]), *COLUMNS, notes)
    assert tagged.rows == [IOB2, ("O",)]
    assert tagged.names == ["O", "B-X", "I-X", "B-Y", "I-Y"]
    assert bool(notes) == (scheme != "IOB2")


def test_word_classes_stay_as_they_are(tmp_path, token_cache):
    rows = [row(["NOUN", "X", "I-verb"]), row(["ADJ", "NOUN"])]
    tagged = tags.read_tags(read(tmp_path / "a.jsonl", rows), *COLUMNS, [])
    assert tagged.rows == [("NOUN", "X", "I-verb"), ("ADJ", "NOUN")]
    assert tagged.names == ["NOUN", "X", "I-verb", "ADJ"]
    assert not tags.are_names(["NOUN", "B-x"])
    assert tags.inside_labels(["NOUN", "B-x", "I-x"]).tolist() == [0, 1, 2]


def test_a_conll_file_is_read_like_its_rows(tmp_path, token_cache):
    path = tmp_path / "a.conll"
    path.write_text(
        "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VB O\n\u3000\n# id 7\tdomain=en\n# text = Peter Black\n"
        "Peter NNP B-PER\nBlack NNP I-PER",
        "utf-8",
    )
    table = tags.as_sentences(read_table(str(path), required=COLUMNS), *COLUMNS, False)
    assert [tags.words_of(cell) for cell in table.columns["tokens"]] == [
        ["EU", "rejects"],
        ["Peter", "Black"],
    ]
    assert tags.read_tags(table, *COLUMNS, []).rows == [("B-ORG", "O"), ("B-PER", "I-PER")]
    assert [table.where(number) for number in range(2)] == [f"{path}:3", f"{path}:8"]
    path.write_text("#id O\n# O\n\n# O\nlast O\n", "utf-8")  # words
    table = read_table(str(path), required=COLUMNS[:1], optional=())
    assert list(table.columns[COLUMNS[0]]) == [["#id", "#"], ["#", "last"]]
    path.write_text("a b\tO\nc \tO \n", "utf-8")  # tabs: words may hold spaces
    table = read_table(str(path), required=COLUMNS)
    assert [list(table.columns[name]) for name in COLUMNS] == [[["a b", "c"]], [["O", "O"]]]
    path.write_text("我\n\u3000\n爱\r\n", "utf-8")  # a wide space is a word, no end of a sentence
    table = read_table(str(path), required=COLUMNS[:1], optional=COLUMNS[1:])
    assert list(table.columns[COLUMNS[0]]) == [["我", "\u3000", "爱"]]


@pytest.mark.parametrize(
    ("words", "text", "spans"),
    [
        (["EU", "rejects", "."], "EU rejects .", [(0, 2), (3, 10), (11, 12)]),
        (["我", "爱", "北京", "。"], "我爱北京。", [(0, 1), (1, 2), (2, 4), (4, 5)]),
        (["用", "BERT", "分类"], "用BERT分类", [(0, 1), (1, 5), (5, 7)]),
        (["a", "a", "New York"], "a a New York", [(0, 1), (2, 3), (4, 12)]),
    ],
)
def test_words_stand_in_a_text(words, text, spans):
    cell = "\n".join(words)
    assert tags.words_of(cell) == words
    assert tags.text_of(cell) == text
    assert tags.spans_of(words, text) == spans


def test_a_text_is_split_into_words_whose_places_are_its_own():
    text = "Mr. Müller's  flat in 北京"
    cell = f"{RAW}{text}"
    assert tags.text_of(cell) == text
    words = tags.words_of(cell)
    assert words == ["Mr", ".", "Müller", "'", "s", "flat", "in", "北", "京"]
    assert [text[start:end] for start, end in tags.spans_of(words, text)] == words
    assert tags.words_of("") == []
    # Vowel signs, a joiner and an accent of its own are parts of words.
    assert tags.words_of(f"{RAW}हिन्दी में, می\u200cخواهم cafe\u0301s ❤") == [
        *("हिन्दी", "में", ",", "می\u200cخواهم", "cafe\u0301s", "❤")
    ]


WORDS = [f"{letter}{number}" for number in range(10) for letter in "abcde"]


@pytest.fixture
def tokenizer():
    return train_tokenizer([" ".join(WORDS[:30])] * 2, 128)


def test_each_word_of_a_long_sentence_is_in_one_window(tokenizer):
    setting = SentenceWindows("windows", 16, tokens=14)
    found = setting.encoder(tokenizer, "")(["\n".join(WORDS), "\n".join(WORDS[:3]), ""])
    assert found["cut"] == [True, False, False]
    ids, numbers = (np.array(found[name][0]) for name in ("input_ids", "word_ids"))
    whole = tokenizer(WORDS, is_split_into_words=True)
    first = tags.first_tokens(numbers.copy())
    assert numbers[first].tolist() == list(range(len(WORDS)))
    # Every token of the sentence is tagged once, in its order; what is around it is only read.
    assert ids[numbers >= 0].tolist() == whole["input_ids"][1:-1]
    for start in range(0, len(ids), 16):
        window = numbers[start : start + 16]
        real = window[window != PADDING]
        assert len(real) <= 14
        assert (real[0], real[-1]) == (SPECIAL, SPECIAL)
        assert ids[start] == tokenizer.cls_token_id
        assert start + 16 > len(ids) or (window[len(real) :] == PADDING).all()
    assert (numbers[17:19] == SPECIAL).any()  # the second window begins with words of the first
    assert found["word_ids"][1].count(SPECIAL) == 2
    assert found["word_ids"][2] == [SPECIAL, SPECIAL]


def test_a_word_without_a_token_becomes_the_unknown_one(tokenizer):
    found = SentenceWindows("windows", 16, tokens=16).encoder(tokenizer, "")(["a1\n\u200b\nb1"])
    numbers = np.array(found["word_ids"][0])
    assert numbers[tags.first_tokens(numbers.copy())].tolist() == [0, 1, 2]
    assert tokenizer.unk_token_id in found["input_ids"][0]


@pytest.mark.parametrize("cell", ["a\nba\n'\n中\n文", f"{RAW}  ba  a'ba,中 a", f"{RAW}a ", ""])
def test_bytes_of_a_word_have_the_spaces_of_the_text(cell, tokenizer):
    """Else RoBERTa would be trained on words that the pipeline reads with other tokens."""
    symbols = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet()), "ba", "Ġba"]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    by_bytes = RobertaTokenizer(vocab=vocabulary, merges=[("b", "a"), ("Ġ", "ba")])
    assert (tags.keeps_spaces(by_bytes), tags.keeps_spaces(tokenizer)) == (True, False)
    setting = SentenceWindows("windows", 64, tokens=64, spaces=True)
    found, words = setting.encoder(by_bytes, "")([cell]), tags.words_of(cell)
    whole = by_bytes(tags.text_of(cell).rstrip())
    assert found["input_ids"][0] == whole["input_ids"]
    numbers = np.array(found["word_ids"][0])
    assert numbers[tags.first_tokens(numbers.copy())].tolist() == list(range(len(words)))


def test_further_tokens_are_inside():
    assert tags.inside_labels(["O", "B-X", "I-X", "B-Y", "NOUN"]).tolist() == [0, 2, 2, 3, 4]
    first = tags.first_tokens(torch.tensor([[-1, 0, 0, 1, -1, -2, -1, 2, 2]]))
    assert first.int().tolist() == [[0, 1, 0, 1, 0, 0, 0, 1, 0]]


def test_what_rows_without_names_do_not_define():
    found = tags.undefined_metrics(tags.Tagged([("O",), ()]), ["O", "B-X", "I-X"])
    assert found == {"precision", "recall", "f1", "f1_macro", "f1_X"}
    assert tags.undefined_metrics(tags.Tagged([("B-X",)]), ["O", "B-X", "B-Y"]) == {"f1_Y"}
    assert tags.undefined_metrics(tags.Tagged([("NOUN",)]), ["NOUN", "ADJ"]) == {"f1_ADJ"}


TRUTH = [["B-X", "I-X", "O", "B-Y"], ["O", "B-X"], ["B-Y", "I-Y"]]
FOUND = [["B-X", "I-X", "O", "B-X"], ["O", "B-X"], ["B-Y", "O"]]
LABELS = ["O", "B-X", "I-X", "B-Y", "I-Y", "B-Z", "I-Z"]


def test_names_are_scored_as_wholes():
    scores = tags.scores_of(TRUTH, FOUND, LABELS)
    assert scores["f1"] == pytest.approx(f1_score(TRUTH, FOUND)) == pytest.approx(0.5)
    assert (scores["precision"], scores["recall"]) == (0.5, 0.5)
    assert scores["f1_X"] == pytest.approx(0.8)
    assert (scores["f1_Y"], scores["f1_Z"]) == (0.0, None)
    assert scores["f1_macro"] == pytest.approx(0.4)
    assert scores["accuracy"] == pytest.approx(6 / 8)
    none = tags.scores_of([["O"]], [["O"]], LABELS)
    assert (none["f1"], none["accuracy"]) == (None, 1.0)
    assert ["loss", *scores] == tags.metric_names(LABELS)
    assert str(tags.per_type(TRUTH, FOUND, LABELS)["X"]["support"]) == "2"


def test_word_classes_are_scored_word_by_word():
    rows = [["N", "V", "N"]], [["N", "N", "N"]], ["N", "V", "A"]
    nouns, verbs = tags.per_type(*rows).values()
    assert nouns == {"precision": 2 / 3, "recall": 1.0, "f1": 0.8, "support": 2}
    assert verbs == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1}
    scores = tags.scores_of(*rows)
    assert scores == {"accuracy": 2 / 3, "f1_macro": 0.4, "f1_N": 0.8, "f1_V": 0.0, "f1_A": None}
    confusion = tags.report_content(*rows, np.ones(1), ["a\nb\nc"]).figures["tag_confusion"].axes[0]
    assert [tick.get_text() for tick in confusion.get_yticklabels()] == ["N", "V"]


def test_the_commonest_tag_of_a_word():
    known, other = tags.commonest_tags(["a\nb", "a\nc", "a\nd"], Ragged.of([[1, 0], [2, 0], [2, 0]]))
    assert (known, other) == ({"a": 2, "b": 0, "c": 0, "d": 0}, 0)


def test_names_have_places_in_the_text():
    words = ["Bank", "of", "Sun", "opens"]
    (found,) = tags.entities_of(["B-X", "I-X", "I-X", "O"], words, "Bank of Sun opens", [0.5, 0.7, 0.9, 1.0])
    assert found == {"type": "X", "start": 0, "end": 11, "text": "Bank of Sun", "words": [0, 3], "score": 0.7}
