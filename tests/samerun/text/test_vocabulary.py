import json
import os
import subprocess
import sys

import pytest
from launchers import APP
from transformers import AutoTokenizer

from samerun.errors import InputError
from samerun.text.tokenizer import SPECIAL_TOKENS, train_tokenizer

TEXTS = [
    "Returns the sorted eigenvalues of a matrix.",
    "Sort the values of a matrix and return them.",
    "返回矩阵的特征值。Eigenvalues 按大小排序。",
    "abab baba cdcd dcdc efef fefe ghgh hghg",  # every merge of these ties with several others
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 100)


def test_special_tokens_have_the_first_ids_and_ids_are_dense(tokenizer):
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4]) == list(SPECIAL_TOKENS)
    assert [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.cls_token_id] == [0, 1, 2]
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_merges_are_taken_by_frequency():
    tokenizer = train_tokenizer(["xy zw xy", "xy zw zw xy xy"], 5 + 4 + 2 + 1)
    assert tokenizer.convert_ids_to_tokens(range(5, 12)) == ["w", "x", "y", "z", "##w", "##y", "xy"]


def test_saved_folder_loads_as_a_stock_tokenizer_beside_any_model(tokenizer, tmp_path):
    parts = {"encoder": {"model_type": "big_bird"}, "decoder": {"model_type": "bert"}}
    for model_type in (None, "bert", "big_bird", "encoder-decoder", "modernbert"):
        folder = tmp_path / str(model_type)
        tokenizer.save_pretrained(folder)
        if model_type:
            own = {"model_type": model_type, **(parts if "-" in model_type else {})}
            (folder / "config.json").write_text(json.dumps(own))
        loaded = AutoTokenizer.from_pretrained(folder)
        assert loaded.__class__.__module__.startswith("transformers.")
        assert loaded(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"], model_type
        ids = tokenizer(TEXTS[2])["input_ids"]
        assert loaded.decode(ids) == tokenizer.decode(ids), model_type
        assert not list(folder.glob("*.py"))


@pytest.mark.slow
def test_same_texts_give_the_same_vocabulary_in_every_process_and_order(tokenizer):
    """The trainer of `tokenizers` alone gives another vocabulary at nearly every call on these texts."""
    program = (
        "import json, sys; from samerun.text.tokenizer import train_tokenizer\n"
        "print(json.dumps(train_tokenizer(json.loads(sys.argv[1]), 100).get_vocab()))"
    )
    for hash_seed, texts in (("1", TEXTS), ("2", TEXTS[::-1])):
        environment = {**os.environ, "PYTHONPATH": str(APP), "PYTHONHASHSEED": hash_seed}
        output = subprocess.run(
            [sys.executable, "-c", program, json.dumps(texts)],
            env=environment,
            capture_output=True,
            check=True,
        ).stdout
        assert json.loads(output) == tokenizer.get_vocab()
    for _ in range(5):
        assert train_tokenizer(TEXTS, 100).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("letter", ["a", "ß", "𝔞"])  # of one to four bytes
def test_words_too_long_for_wordpiece_teach_nothing(letter):
    assert set(train_tokenizer([f"{letter * 101} b"], 100).get_vocab()) == {*SPECIAL_TOKENS, "b"}
    assert letter * 100 in train_tokenizer([f"{letter * 100} b"], 200).get_vocab()


def test_a_size_below_the_alphabet_says_which_size_is_needed():
    with pytest.raises(InputError, match=r"vocab_size 8 is too small.*4 characters.*11 entries"):
        train_tokenizer(["xy zw xy"], 8)
    with pytest.raises(InputError, match="11 entries"):
        train_tokenizer(["xy zw"], 10)
    assert len(train_tokenizer(["xy zw"], 11)) == 11


@pytest.mark.parametrize("texts", [[], ["", "  \n"], ["\u200b\ufeff"]])
def test_texts_without_a_word_are_refused(texts):
    with pytest.raises(InputError, match="no word"):
        train_tokenizer(texts, 100)
