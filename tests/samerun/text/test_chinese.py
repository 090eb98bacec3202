import copy
import json
import pickle

import pytest
from tables import cells_of
from transformers import AutoTokenizer, BertTokenizer, RoFormerTokenizer

from samerun.data.tokens import encode_cached
from samerun.errors import InputError
from samerun.text.tokenizer import (
    SPECIAL_TOKENS,
    TextEncoder,
    jieba_tokenizer,
    join_chinese,
    load_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
)

WORDS = """
人工智能 未来 深度 机器学习 模型 编程 c++ t恤
人 工 智 能 是 未 来 深 度 学 习 的 模 型 机 器 与 用 编 程 ， 。
bert ##s caf cafe gp ##t - 4 [unused1] ##ing un ##used ing [ ] # 1 t 恤 said ai & at + c
"""
TEXTS = [
    "人工智能是未来，深度学习模型。",
    "用C++编程的T恤",
    "BERTs 与 café 的模型",
    "plain BERTs café GPT-4",
    "",
    "编程 [MASK] 模型",
    "机器学习",
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "vocab.txt").write_text(
        "\n".join([*SPECIAL_TOKENS, *WORDS.split()]) + "\n", encoding="utf-8"
    )
    (tmp_path / "model" / "config.json").write_text('{"model_type": "big_bird"}')
    return tmp_path / "model"


@pytest.fixture
def dictionary(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\ufeff机器学习 50000 n\n\nT恤\n深度学习\n未来学 3\n学\nai\n", encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(folder):
    return jieba_tokenizer(folder, None, [])


def ids_of(tokenizer):
    return tokenizer(TEXTS)["input_ids"]


def test_words_of_the_vocabulary_are_tokens_and_others_become_characters(tokenizer):
    expected = ["人工智能", "是", "未来", "，", "深度", "学", "习", "的", "模型"]
    assert tokenizer.tokenize("人工智能是未来，深度学习的模型") == expected


def test_latin_text_is_mostly_what_bert_makes_of_it(tokenizer, folder):
    stock = BertTokenizer.from_pretrained(folder)
    for text in ("BERTs café GPT-4", "un\tused\u200b ##ing", "naïve 4-4 [MASK]", "AT&T C#"):
        assert tokenizer.tokenize(text) == stock.tokenize(text)
    assert tokenizer.tokenize("用C++编程，1+1") == ["用", "c++", "编程", "，", "1", "+", "1"]


@pytest.mark.parametrize(
    "options", [{}, {"do_lower_case": False}, {"do_lower_case": False, "strip_accents": True}]
)
def test_case_accents_and_length_are_the_models(folder, tmp_path, options):
    BertTokenizer.from_pretrained(
        folder, model_max_length=77, truncation_side="left", **options
    ).save_pretrained(tmp_path)
    stock, words = BertTokenizer.from_pretrained(tmp_path), jieba_tokenizer(tmp_path, None, [])
    for text in ("bert BERT", "caf\u00e9") if "strip_accents" in options or not options else ("bert BERT",):
        assert words.tokenize(text) == stock.tokenize(text)
    assert (words.model_max_length, words.truncation_side) == (77, "left")


def test_user_words_of_the_vocabulary_are_kept_whole(folder, dictionary, tokenizer):
    notes = []
    own = jieba_tokenizer(folder, dictionary, notes)
    # rjieba: 机器 / 学习, neither in the vocabulary.
    assert tokenizer.tokenize("机器学习") == list("机器学习")
    assert own.tokenize("用机器学习") == ["用", "机器学习"]
    assert own.tokenize("T恤") == ["t恤"]
    assert own.tokenize("人工智能") == ["人工智能"]
    assert own.tokenize("said ai") == ["said", "ai"]
    assert own.get_vocab() == tokenizer.get_vocab()
    assert notes == [
        f"user dictionary {dictionary}: 2 of 6 words are not in the vocabulary and change nothing, "
        "such as '深度学习'"
    ]
    assert tokenizer_fingerprint(own) != tokenizer_fingerprint(tokenizer)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("model_type", ["bert", "big_bird", "encoder-decoder"])
def test_plain_autotokenizer_gives_the_same_ids(folder, dictionary, tmp_path, arguments, given, model_type):
    own = jieba_tokenizer(folder, dictionary if given else None, [])
    own.save_pretrained(tmp_path / "first")
    parts = (
        {"encoder": {"model_type": "big_bird"}, "decoder": {"model_type": "bert"}}
        if "-" in model_type
        else {}
    )
    (tmp_path / "first" / "config.json").write_text(json.dumps({"model_type": model_type, **parts}))
    loaded = AutoTokenizer.from_pretrained(tmp_path / "first")
    assert type(loaded) is RoFormerTokenizer
    loaded.save_pretrained(tmp_path / "second")
    for again in (
        own,
        loaded,
        AutoTokenizer.from_pretrained(tmp_path / "second"),
        jieba_tokenizer(tmp_path / "first", None, []),
    ):
        assert ids_of(again) == ids_of(own)
        assert tokenizer_fingerprint(again) == tokenizer_fingerprint(own)
    saved = load_tokenizer(arguments(tokenizer_name=str(tmp_path / "first")), [], [])
    assert ids_of(copy.deepcopy(saved)) == ids_of(own)
    assert saved.tokenize("机器学习") == (["机器学习"] if given else list("机器学习"))
    assert saved("编程", "模型")["token_type_ids"] == [0, 0, 0, 1, 1]


def test_copies_pickles_and_processes_give_the_same_ids(folder, dictionary, token_cache):
    own = jieba_tokenizer(folder, dictionary, [])
    for other in (pickle.loads(pickle.dumps(own)), copy.deepcopy(own)):
        assert ids_of(other) == ids_of(own)
    assert tokenizer_fingerprint(own) == tokenizer_fingerprint(pickle.loads(pickle.dumps(own)))
    texts = cells_of(TEXTS * 400)
    found = encode_cached(texts, TextEncoder(own, 12), tokenizer_fingerprint(own), num_proc=2)["input_ids"]
    assert [found[row].tolist() for row in range(len(TEXTS))] == own(TEXTS, truncation=True, max_length=12)[
        "input_ids"
    ]


def test_vocabularies_without_chinese_words_are_refused(tmp_path):
    (tmp_path / "sentencepiece").mkdir()
    words = ["<pad>", "</s>", "▁深度", *WORDS.split()]
    (tmp_path / "sentencepiece" / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    train_tokenizer(["深度学习 bert"], 40).save_pretrained(tmp_path / "characters")
    for name in ("none", "characters", "sentencepiece"):
        (tmp_path / name).mkdir(exist_ok=True)
        with pytest.raises(InputError, match=f"{name} has no WordPiece vocabulary that holds Chinese words"):
            jieba_tokenizer(tmp_path / name, None, [])


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"\xb0\xa1\xff", "not UTF-8 at byte 0"), (b"\n \n", "holds no word")],
)
def test_an_unreadable_user_dictionary_is_refused(folder, tmp_path, content, message):
    path = tmp_path / "words.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        jieba_tokenizer(folder, path, [])


JOINED = {
    "深 度 学 习": "深度学习",
    "人工智能 是 未来": "人工智能是未来",  # words, as from the jieba tokenizer
    "深 度 学 习 ， 未 来 。": "深度学习，未来。",
    "《 红 楼 梦 》 （ 上 ）": "《红楼梦》（上）",
    "使 用 BERT 模 型": "使用 BERT 模型",
    "使 用 big bird 模 型": "使用 big bird 模型",
    "模 型 ： BERT ， GPT": "模型：BERT，GPT",
    "2023 年 3 月": "2023 年 3 月",
    "论 “ 大 数 据 ” 的 影 响": "论“大数据”的影响",
    "论 “ big data ” 时 代": "论“big data”时代",
    "马 克 · 吐 温": "马克·吐温",
    "是 吗 ? 是 !": "是吗? 是!",
    "中 文 ( 简 体 ) 版": "中文 (简体) 版",
    "深   度": "深度",
    "機 器 ツ ー ル の 本": "機器ツールの本",
    "第 一 行\n第 二 行": "第一行\n第二行",
    " 深 度 ": "深度",
    "𠀀 𠀁": "𠀀𠀁",
    "Ａ Ｂ １ 班": "ＡＢ１班",
}
UNCHANGED = [
    "",
    "deep learning for long documents",
    "it ’ s a dash — here … and ( there )",
    "a, b; c: d",
    "deep\nlearning",
    "한국어 문장",
]


@pytest.mark.parametrize(("decoded", "joined"), [*JOINED.items(), *((text, text) for text in UNCHANGED)])
def test_added_spaces_go_and_others_stay(decoded, joined):
    assert join_chinese(decoded) == join_chinese(joined) == joined
