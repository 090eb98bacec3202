"""Ways of reading Chinese text into tokens, with one vocabulary for all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarking.contenders.passes import passes


def tokenize(settings: dict[str, Any]) -> dict[str, Any]:
    """`--tokenizer_type jieba`, or BERT's tokenizer in Rust or in Python, over one vocabulary; each pass takes new texts."""
    folder = Path(settings["inputs"], "chinese")
    slices = json.loads((folder / "slices.json").read_text(encoding="utf-8"))
    encode = encoder_of(settings["contender"], folder)
    encode(slices[0][:2])
    numbers = itertools.count()
    tokens, characters = [], []

    def one() -> None:
        texts = slices[next(numbers) % len(slices)]
        tokens.append(sum(map(len, encode(texts))))
        characters.append(sum(map(len, texts)))

    _, figures = passes(settings, one)
    return figures | {"units": tokens, "characters": characters}


def encoder_of(name: str, folder: Path) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to ids. Nothing is cut."""
    from transformers import AutoTokenizer

    from text.tokenizer import TextEncoder

    longest = 10**9
    if name == "bert_python":
        from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

        tokenizer = BertTokenizerLegacy(str(folder / "vocab.txt"))
        return lambda texts: tokenizer(texts)["input_ids"]
    if name == "jieba":
        from text.chinese_words import jieba_tokenizer

        encode = TextEncoder(jieba_tokenizer(folder, None, []), longest)
    else:
        encode = TextEncoder(AutoTokenizer.from_pretrained(folder), longest)
    return lambda texts: encode(texts)["input_ids"]


CONTENDERS = dict.fromkeys(("jieba", "bert_rust", "bert_python"), tokenize)
