"""Chinese text for the tokenizers, and a vocabulary of its words."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarking.contenders.title_rows import read_rows

WORDS = 20000  # words of the vocabulary, beside all characters
SLICES = 20  # a tokenizer meets a text again only after so many passes
# Where there is no Chinese text to be had; frequent words, drawn by their rank as in natural language.
COMMON = """
的 是 在 了 和 有 我们 一个 可以 不 这个 使用 中国 问题 系统 没有 文件 他们 程序 因为 研究
数据 如果 需要 自己 社会 方法 时间 已经 进行 通过 工作 发展 技术 但是 软件 信息 人们 所以 开始
分析 用户 经济 网络 世界 提供 文化 关系 模型 可能 结果 服务器 影响 学习 例如 不同 企业 语言
生活 重要 国家 代码 理论 教育 其他 市场 管理 计算机 历史 操作 环境 目录 知道 科学 支持 地区
增加 命令 运行 提高 政府 过程 特别 目前 基础 内容 开源 项目 健康 水平 设计 大学 实验 安装 版本
表明 城市 传统 选择 思想 农业 理解 艺术 机器 建立 材料 温度 能够 医院 免费 价值 北京 标准
图书馆 相关 提出 东西 能源 变化 银行 上海 改革 桌面 法律
"""


def make_chinese(settings: dict[str, Any], rows: list[dict[str, str]], inputs: Path) -> str:
    """Slices of Chinese text and a vocabulary of its words, below inputs/chinese; returns what the text is."""
    import rjieba
    from transformers import BertTokenizer

    from metrics.rouge_tokenizers import choose_tokenizer
    from text.vocabulary import SPECIAL_TOKENS

    texts = [row["text"] for row in rows]
    kind = "of --train_file"
    if settings["chinese_file"]:
        texts, kind = [row["text"] for row in read_rows(settings["chinese_file"])], "of --chinese_file"
    elif choose_tokenizer(texts) != "characters":
        texts, kind = list(draw_chinese(settings)), "frequent words drawn at random"
    slices = slice_texts(texts, settings["characters"])
    words = Counter(word for part in slices for text in part for word in rjieba.cut(text, False) if word.strip())
    characters = sorted({character for word in words for character in word.lower()})
    known = [word.lower() for word, _ in words.most_common(WORDS)]
    entries = dict.fromkeys([*SPECIAL_TOKENS, *characters, *(f"##{c}" for c in characters if c.isascii()), *known])
    folder = inputs / "chinese"
    BertTokenizer(vocab={word: number for number, word in enumerate(entries)}).save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in entries), encoding="utf-8")
    (folder / "slices.json").write_text(json.dumps(slices, ensure_ascii=False), encoding="utf-8")
    return kind


def draw_chinese(settings: dict[str, Any]) -> Iterator[str]:
    """Enough documents of drawn words for all slices."""
    drawn, words = random.Random(settings["seed"]), COMMON.split()
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    written = 0
    while written < SLICES * settings["characters"]:
        sentences = ("".join(drawn.choices(words, weights, k=drawn.randint(5, 20))) + "。" for _ in range(40))
        text = "".join(sentences)
        written += len(text)
        yield text


def slice_texts(texts: list[str], characters: int) -> list[list[str]]:
    """The texts shared out to slices of at least so many characters; fewer slices where there is not enough, at least one."""
    slices: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size >= characters:
            if len(slices) == SLICES:
                break
            slices.append([])
            size = 0
        slices[-1].append(text)
        size += len(text)
    return slices[:-1] if len(slices) > 1 and size < characters else slices
