import pytest

from samerun.text.chinese import join_chinese
from samerun.text.vocabulary import train_tokenizer

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


@pytest.mark.parametrize(("decoded", "joined"), JOINED.items())
def test_added_spaces_go_and_others_stay(decoded, joined):
    assert join_chinese(decoded) == joined


@pytest.mark.parametrize("text", [*UNCHANGED, *JOINED.values()])
def test_what_needs_no_joining_is_unchanged(text):
    assert join_chinese(text) == text


def test_a_decoded_sentence_reads_as_it_was_written():
    text = "深度学习 bert 模型的“注意力”机制，见《指南》。"
    tokenizer = train_tokenizer([text], 60)
    decoded = tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)
    assert "深 度" in decoded
    assert join_chinese(decoded) == text
