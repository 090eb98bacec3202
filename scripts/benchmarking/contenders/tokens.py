"""Ways of reading Chinese text into tokens, with one vocabulary for all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from benchmarking.watch import watch_passes
from text.chinese_words import jieba_tokenizer
from text.tokenizer import saved_tokenizer, text_encoder


class Tokenizing:
    """`--tokenizer_type jieba`, or BERT's tokenizer in Rust or in Python, over one vocabulary; each pass takes new texts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        folder = Path(settings["inputs"])
        slices = json.loads((folder / "slices.json").read_text(encoding="utf-8"))
        self.slices, self.encode = itertools.cycle(slices), encoder_of(settings["contender"], folder)
        self.tokens: list[int] = []
        self.characters: list[int] = []
        self.encode(slices[0][:2])

    def one_pass(self) -> None:
        texts = next(self.slices)
        self.tokens.append(sum(map(len, self.encode(texts)["input_ids"])))
        self.characters.append(sum(map(len, texts)))


def encoder_of(name: str, folder: Path) -> Callable[[list[str]], dict[str, list]]:
    if name == "bert_python":
        return BertTokenizerLegacy(str(folder / "vocab.txt"))
    return text_encoder(jieba_tokenizer(folder) if name == "jieba" else saved_tokenizer(folder), 10**9)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    work = Tokenizing(settings)
    _, measured = watch_passes(settings, work.one_pass, settings["max_steps"])
    return measured | {"units": work.tokens, "characters": work.characters}


CONTENDERS = dict.fromkeys(("jieba", "bert_rust", "bert_python"), measure)
