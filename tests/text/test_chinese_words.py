import copy
import json
import pickle
import shutil

import pytest
from transformers import AutoTokenizer, BertTokenizer

from finetune.errors import InputError
from text.chinese_words import JiebaTokenizer, jieba_tokenizer, load_tokenizer, map_strings
from text.vocabulary import SPECIAL_TOKENS, train_tokenizer

WORDS = """
人工智能 未来 深度 机器学习 模型 编程 t恤 c++
人 工 智 能 是 未 来 深 度 学 习 的 模 型 机 器 与 用 编 程 ， 。
bert ##s caf cafe gp ##t - 4 [unused1] ##ing un ##used ing [ ] # 1
"""
TEXTS = [
    "人工智能是未来，深度学习模型。",
    "用C++编程的T恤",
    "BERTs 与 café 的模型",
    "plain BERTs café GPT-4",
    "",
    "编程 [MASK] 模型",
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS.split()]) + "\n", encoding="utf-8")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "big_bird"}')
    return tmp_path / "model"


@pytest.fixture
def dictionary(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\ufeff机器学习 50000 n\n\n深度学习\n", encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(folder):
    return jieba_tokenizer(folder)


def test_words_of_the_vocabulary_are_tokens_and_others_become_characters(tokenizer):
    assert tokenizer.tokenize("人工智能是未来，深度学习的模型") == [
        "人工智能",
        "是",
        "未来",
        "，",
        "深度",
        "学",
        "习",
        "的",
        "模型",
    ]


def test_words_with_latin_letters_are_found_as_written_and_lowercased(tokenizer):
    assert tokenizer.tokenize("用C++编程，T恤") == ["用", "c++", "编程", "，", "t恤"]


def test_latin_text_is_what_bert_makes_of_it(tokenizer, folder):
    stock = BertTokenizer.from_pretrained(folder)
    for text in ("BERTs café GPT-4", "un\tused\u200b [unused1] ##ing", "naïve 4-4 한국"):
        assert tokenizer.tokenize(text) == stock.tokenize(text)


def test_special_tokens_in_a_text_are_kept(tokenizer):
    assert tokenizer.tokenize("编程[MASK]模型") == ["编程", "[MASK]", "模型"]


def test_tokens_added_later_are_kept(tokenizer):
    tokenizer.add_tokens(["编程模型"])
    assert tokenizer.tokenize("用编程模型") == ["用", "编程模型"]


def test_pairs_padding_and_truncation_work_as_usual(tokenizer):
    ids = tokenizer.get_vocab()
    batch = tokenizer(["人工智能的", "编程"], ["模型", "未来模型"], padding=True, truncation=True, max_length=6)
    assert batch["input_ids"] == [
        [2, ids["人工智能"], ids["的"], 3, ids["模型"], 3],
        [2, ids["编程"], 3, ids["未来"], ids["模型"], 3],
    ]
    assert batch["token_type_ids"] == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    shorter = tokenizer(["人工智能的模型", "编程"], padding=True, truncation=True, max_length=4)
    assert shorter["input_ids"][1] == [2, ids["编程"], 3, 0]


def test_words_given_by_the_caller_keep_their_numbers(tokenizer):
    assert tokenizer(["人工智能未来", "编程"], is_split_into_words=True).word_ids() == [None, 0, 0, 1, None]


def test_offsets_are_refused(tokenizer):
    with pytest.raises(NotImplementedError, match="offsets"):
        tokenizer("编程", return_offsets_mapping=True)


def test_user_words_decide_the_cut(folder, dictionary, tokenizer):
    own = jieba_tokenizer(folder, user_dictionary=dictionary)
    assert tokenizer.tokenize("机器学习") == ["机", "器", "学", "习"]  # rjieba: 机器 / 学习, neither in the vocabulary
    assert own.tokenize("机器学习") == ["机器学习"]
    assert own.tokenize("深度学习") == ["深", "度", "学", "习"]  # one word now, and not in the vocabulary


def test_hmm_is_passed_on_and_saved(folder, tmp_path):
    guessing = jieba_tokenizer(folder, hmm=True)
    assert guessing.segment("中出了模型") == "中 出 了 模型"  # one guessed word, unknown: characters
    guessing.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").hmm is True


def test_copies_and_pickles_give_the_same_ids(folder, dictionary):
    own = jieba_tokenizer(folder, user_dictionary=dictionary)
    before = pickle.dumps(own)
    ids = own(TEXTS)["input_ids"]
    assert pickle.dumps(own) == before  # else a cache keyed by the tokenizer would miss after its first use
    assert pickle.loads(before)(TEXTS)["input_ids"] == ids
    assert copy.deepcopy(own)(TEXTS)["input_ids"] == ids


def test_a_saved_folder_needs_nothing_of_the_first_one(folder, dictionary, tmp_path):
    own = jieba_tokenizer(folder, user_dictionary=dictionary)
    ids = own([*TEXTS, "机器学习"])["input_ids"]
    shutil.rmtree(folder)
    dictionary.unlink()
    own.save_pretrained(tmp_path / "first")
    loaded = load_tokenizer(tmp_path / "first")
    assert isinstance(loaded, JiebaTokenizer)
    loaded.save_pretrained(tmp_path / "second")
    again = load_tokenizer(tmp_path / "second")
    for other in (own, loaded, again):
        assert other([*TEXTS, "机器学习"])["input_ids"] == ids


def test_plain_autotokenizer_reads_the_saved_folder_by_characters(folder, dictionary, tmp_path):
    own = jieba_tokenizer(folder, user_dictionary=dictionary)
    own.save_pretrained(tmp_path / "saved")
    for model_type in ("bert", "big_bird"):
        (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": model_type}))
        plain = AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert type(plain) is BertTokenizer
        assert plain.get_vocab() == own.get_vocab()
        assert plain.tokenize("人工智能是未来") == list("人工智能是未来")
        assert plain.tokenize("BERTs") == own.tokenize("BERTs")


def test_load_tokenizer_leaves_other_folders_to_autotokenizer(tmp_path):
    train_tokenizer(["one two"], 30).save_pretrained(tmp_path)
    assert type(load_tokenizer(tmp_path)) is BertTokenizer


def test_a_folder_without_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no vocabulary"):
        jieba_tokenizer(tmp_path)


def test_a_vocabulary_of_characters_is_refused(tmp_path):
    train_tokenizer(["深度学习 bert"], 40).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no Chinese word of two or more characters"):
        jieba_tokenizer(tmp_path)


def test_a_vocabulary_that_is_not_wordpiece_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["<pad>", "</s>", "▁深度", *WORDS.split()]), encoding="utf-8")
    with pytest.raises(InputError, match="not BERT's WordPiece"):
        jieba_tokenizer(tmp_path)


def test_every_bad_line_of_a_user_dictionary_is_named(folder, tmp_path):
    path = tmp_path / "bad.txt"
    path.write_text("好词\n坏词 many\n深度 学习 的 模型\n坏词 -3\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        jieba_tokenizer(folder, user_dictionary=path)
    assert [problem.split("bad.txt:")[1].split(":")[0] for problem in caught.value.problems] == ["2", "3", "4"]


def test_a_user_word_that_rjieba_cannot_keep_is_refused(folder, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("马克·吐温\n众数云网\n", encoding="utf-8")
    with pytest.raises(InputError, match="马克·吐温") as caught:
        jieba_tokenizer(folder, user_dictionary=path)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"\xb0\xa1\xff", "not UTF-8 .byte 0"), (b"\n \n", "holds no word")],
)
def test_an_unreadable_user_dictionary_is_refused(folder, tmp_path, content, message):
    path = tmp_path / "words.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        jieba_tokenizer(folder, user_dictionary=path)


def test_map_strings_keeps_the_shape():
    assert map_strings(str.upper, [("a", "b"), ["c"], None]) == [("A", "B"), ["C"], None]
