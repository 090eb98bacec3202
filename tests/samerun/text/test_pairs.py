"""Pairs of texts: tokens, batches, and the check of a model's inputs."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import tables
from classify import Arguments, TextClassification
from transformers import BertConfig, XLNetConfig

from samerun.data.tables import CellPairs
from samerun.data.tokens import encode_cached
from samerun.errors import InputError
from samerun.text.head import check_pairs
from samerun.text.text import TextTask
from samerun.text.tokenizer import PairEncoder, train_tokenizer

FIRST = ["red apple pie", "green grass", "red " * 30, "blue"]
SECOND = ["green grass grows here", "pie", "apple", "grass " * 30]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([*FIRST, *SECOND], 128)


@pytest.fixture
def pairs():
    return CellPairs(tables.table({"b": SECOND, "a": FIRST}), ("a", "b"))


@pytest.mark.parametrize("processes", [None, 2])
def test_tokens_are_those_of_transformers_cut_at_the_longer_text(tokenizer, pairs, processes):
    encoded = encode_cached(pairs, PairEncoder(tokenizer, 12, True), f"{processes}", processes, True)
    expected = tokenizer(FIRST, SECOND, truncation=True, max_length=12)
    for row in range(4):
        assert encoded["input_ids"][row].tolist() == expected["input_ids"][row]
        assert encoded["token_type_ids"][row].tolist() == expected["token_type_ids"][row]
    assert encoded["cut"].tolist() == [False, False, True, True]
    assert encoded["token_type_ids"].values.max() == 1
    other = encode_cached(pairs, PairEncoder(tokenizer, 12, False), "none", processes, False)
    assert other["token_type_ids"] is None


def task(tokenizer, **given):
    made = TextClassification(Arguments(output_dir="runs/a", **given))
    made.tokenizer, made.max_length, made.padding_multiple, made.has_types = tokenizer, 12, 1, True
    made.long_documents = SimpleNamespace(widths=lambda *_: None, pieces=lambda ids: (ids, None))
    made.config = SimpleNamespace(text_pair=True)
    made.modes = SimpleNamespace(train=False)
    return made


@pytest.mark.parametrize(("config", "side"), [(BertConfig(), "right"), (XLNetConfig(), "left")])
def test_texts_are_padded_where_the_model_does_not_read(config, side, tokenizer):
    made = task(copy.deepcopy(tokenizer))
    made.tokenizer.padding_side = {"left": "right", "right": "left"}[side]
    made.pair_column, made.config = None, config
    made.use_tokenizer(made.tokenizer, config, 16)
    assert made.tokenizer.padding_side == side


def test_a_batch_has_padded_token_types(tokenizer):
    split = task(tokenizer).rows_in_memory(list(zip(FIRST, SECOND, strict=True)))
    inputs = split.collate(np.array([1, 0])).inputs
    expected = tokenizer(
        [FIRST[1], FIRST[0]], [SECOND[1], SECOND[0]], padding=True, max_length=12, return_tensors="pt"
    )
    assert {name: inputs[name].tolist() for name in inputs} == {k: v.tolist() for k, v in expected.items()}


def test_items_in_memory_are_what_the_model_reads(tokenizer):
    with pytest.raises(InputError, match=r"text 1 is .*: the model reads a text and a text_pair"):
        task(tokenizer).rows_in_memory([("a", "b"), "a"])
    single = task(tokenizer)
    single.config = SimpleNamespace(text_pair=False)
    with pytest.raises(InputError, match=r"text 0 is .*: the model reads one text, without a text_pair"):
        single.rows_in_memory([("a", "b")])
    assert not TextTask.reads_pairs.fget(SimpleNamespace(pair_column=None))


def test_the_cards_code_of_a_model_of_pairs_has_two_texts(tokenizer, tmp_path):
    (tmp_path / "metrics.json").write_text("{}")
    made = task(tokenizer, problem_type="single_label", label_column="label")
    made.limits = []
    assert '{"text": "a text", "text_pair": "another text"}, truncation=True' in made.card(tmp_path).usage
    made.config.text_pair = False
    assert 'classify("a text", truncation=True)' in made.card(tmp_path).usage


@pytest.mark.parametrize(
    ("own", "column", "said"),
    [
        (True, None, "reads pairs of texts; name the column of the second by --text_pair_column"),
        (False, "b", "--text_pair_column b: m was trained on single texts; leave it out"),
    ],
)
def test_a_model_is_given_what_it_was_trained_on(own, column, said):
    arguments = SimpleNamespace(model_name_or_path="m", text_pair_column=column)
    with pytest.raises(InputError, match=said):
        check_pairs(arguments, SimpleNamespace(text_pair=own))
    check_pairs(arguments, SimpleNamespace(text_pair=not own))
    check_pairs(arguments, SimpleNamespace())
