import random

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

from samerun.text.rouge import (
    ROUGE_METRICS,
    TOKENIZERS,
    choose_tokenizer,
    exact_matches,
    first_sentence,
    rouge_scores,
    row_scores,
)

TITLES = ["基于深度学习的情感分析", "Linux 系统维护", "水运工程项目管理", "BERT 模型压缩"]


def english_text(rng):
    words = ["The", "cat's", "sat", "on", "state-of-the-art", "mats", "42", "in_situ", "cat", "C++"]
    text = [rng.choice(words) + rng.choice([" ", ", ", ". ", "! "]) for _ in range(rng.randint(0, 12))]
    return "".join(text + (["\nThe cat sat"] if rng.random() < 0.3 else []))


@pytest.mark.parametrize(
    ("tokenizer", "text", "tokens"),
    [
        (
            "characters",
            "基于BERT的2023年·方法，Straße!",
            [*"基于", "bert", "的", "2023", *"年方法", "straße"],
        ),
        ("characters", "ツールの々〇 𠀀 한국 a-b_c", [*"ツールの々〇𠀀", "한국", "a", "b", "c"]),
        ("unicode_words", "Straße_Привет, ΟΔΟΣ!", ["strasse", "привет", "οδοσ"]),
        ("unicode_words", "हिन्दी में", ["हिन्दी", "में"]),  # vowel signs are combining marks
        ("unicode_words", "Cafe\u0301 café", ["café", "café"]),
        ("unicode_words", "مرحبا بالعالم، ٢٠٢٦", ["مرحبا", "بالعالم", "٢٠٢٦"]),
        ("unicode_words", "한국어 제목: 시험", ["한국어", "제목", "시험"]),
        ("unicode_words", "❤️ C++ 42 ...", ["c", "42"]),
    ],
)
def test_tokens(tokenizer, text, tokens):
    assert TOKENIZERS[tokenizer](text) == tokens


@pytest.mark.parametrize(
    ("references", "name"),
    [
        (TITLES, "characters"),
        (["深度学习"] + ["an English title of eight words or so"] * 4, "characters"),  # 4 of 36 units
        (["深度"] + ["an English title of eight words or so"] * 4, "default"),  # 2 of 34
        (["Eigenvalues of a matrix", "naïve café"], "unicode_words"),  # 2 of 6 units
        (["naïve"] + ["an English title of eight words or so"] * 8, "default"),  # 1 of 65
        (["Система управления"], "unicode_words"),
        (["Türkiye'de iklim değişikliği ve su"], "unicode_words"),
        (["ツールの本"], "characters"),
        ([], "default"),
        (["", "！？"], "default"),
    ],
)
def test_tokenizer_is_chosen_by_the_script_of_the_references(references, name):
    assert choose_tokenizer(references) == name


@pytest.mark.parametrize("tokenizer", ["default", "characters", "words", "unicode_words"])
def test_english_equals_rouge_score(tokenizer):
    rng = random.Random(0)
    rows = [(english_text(rng), english_text(rng)) for _ in range(200)]
    theirs = RougeScorer(list(ROUGE_METRICS))
    expected = [
        [theirs.score(reference, prediction)[name].fmeasure for name in ROUGE_METRICS]
        for prediction, reference in rows
    ]
    assert row_scores(*zip(*rows, strict=True), tokenizer) == pytest.approx(np.array(expected), abs=1e-12)
    assert len({tuple(row) for row in expected}) > 100


@pytest.mark.parametrize("stop", ["。", "！", "？", "\n", "。\n"])
def test_chinese_sentences_in_another_order_lose_rouge_l_only(stop):
    scores = rouge_scores([f"丙丁{stop}甲乙{stop}"], [f"甲乙{stop}丙丁"], "characters")
    assert scores["rougeL"] == pytest.approx(0.5)
    assert scores["rougeLsum"] == 1.0


def test_exact_match_leaves_case_and_spaces_aside():
    predictions = ["big bird", "使用 bert 模型", "big birds", ""]
    found = exact_matches(predictions, ["Big  Bird", "使用BERT模型", "big bird", ""])
    assert found == [True, True, False, True]


@pytest.mark.parametrize(
    ("text", "max_units", "lead"),
    [
        ("深度学习很好。后面不要。", 20, "深度学习很好。"),
        ("深度学习很好。后面不要。", 4, "深度学习"),
        ("他说：“很好。”后面。", 20, "他说：“很好。”"),
        ("使用 BERT 模型的方法", 4, "使用 BERT 模"),
        ("Compute the sum. Then stop.", 20, "Compute the sum."),
        ("Compute the\n   sum of values. Then stop.", 20, "Compute the sum of values."),
        ("Compute the sum of values", 3, "Compute the sum"),
        (
            "By J. Smith et al. Rules, e.g. Those of 3.5 apply. No.",
            20,
            "By J. Smith et al. Rules, e.g. Those of 3.5 apply.",
        ),
        ('It said "go." Then it went.', 20, 'It said "go."'),
        ("## 第一节\n\n正文。", 20, "第一节"),
        ("\n\n---\n\n* 《红楼梦》简介。后", 20, "《红楼梦》简介。"),
        ("1. Linux kernel released. More.", 20, "Linux kernel released."),
        ("2. 项目一。项目二", 20, "项目一。"),
        ("！？ ...\n", 5, ""),
        ("", 5, ""),
    ],
)
def test_lead_is_the_first_sentence_cut(text, max_units, lead):
    assert first_sentence(text, max_units) == lead


def test_chinese_by_hand_and_means_over_the_rows():
    """The first row: 6 and 4 characters, 4 in common; of 5 and 3 bigrams 深度 and 模型; longest common
    subsequence 深度模型. So 0.8 and 0.5; the others 0 and 1."""
    scores = rouge_scores(["深度模型", "无关", "学习"], ["深度学习模型", "甲乙", "学习"], "characters")
    assert scores == pytest.approx(
        {"rouge1": 1.8 / 3, "rouge2": 1.5 / 3, "rougeL": 1.8 / 3, "rougeLsum": 1.8 / 3, "exact_match": 1 / 3}
    )
