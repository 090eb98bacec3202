"""The tokenizer of a run, and the function that turns texts into ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import InputError
from finetune.reading.cache import kept
from finetune.reading.fingerprint import fingerprint
from finetune.reading.model_folders import explain_failed_load
from finetune.reading.ragged import RaggedChunks
from finetune.reading.stored_rows import Column

MUCH_UNKNOWN = 0.1  # of the tokens; special tokens count as known
# Lists that nobody reads take a third of the time of short texts: Rust uses all cores, making Python's lists one.
IDS_ALONE = {"return_attention_mask": False, "return_token_type_ids": False}


def load_tokenizer(arguments: Any, train_texts: Sequence[Column]) -> Any:
    """The tokenizer that the arguments name: the model's, another one, or one trained on columns of training texts.

    Raises `InputError` when it cannot be found or has no padding token.
    """
    if arguments.tokenizer_type == "train":
        return _trained(train_texts, arguments.vocab_size)
    name = arguments.tokenizer_name or arguments.model_name_or_path
    if name is None:
        raise InputError("no tokenizer: give --model_name_or_path, --tokenizer_name or --tokenizer_type train")
    try:
        if arguments.tokenizer_type == "jieba":
            from text.chinese_words import jieba_tokenizer

            tokenizer = jieba_tokenizer(name, arguments.user_dictionary)
        else:
            tokenizer = saved_tokenizer(name, arguments.trust_remote_code)
    except InputError:
        raise
    except Exception as error:
        raise InputError(explain_failed_load("tokenizer", name, error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(f"tokenizer {name}: its vocabulary is empty; the folder lacks tokenizer.json or a vocabulary file")
    if tokenizer.pad_token_id is None:
        raise InputError(f"tokenizer {name} has no padding token; add one to its tokenizer_config.json")
    return tokenizer


def saved_tokenizer(name: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub model, one that cuts words by jieba included."""
    if Path(name, "tokenizer_config.json").is_file():
        from text.chinese_words import load_tokenizer as load

        return load(name, trust_remote_code=trust_remote_code)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def text_encoder(tokenizer: Any, max_length: int) -> Callable[[list[str]], dict[str, list]]:
    """A function from texts to {"input_ids": ids per text, with special tokens; "cut": whether the text lost its end}."""

    def encode(texts: list[str]) -> dict[str, list]:
        encoded = tokenizer(texts, truncation=True, max_length=max_length, **IDS_ALONE)
        return {"input_ids": encoded["input_ids"], "cut": [bool(e.overflowing) for e in encoded.encodings]}

    return encode


def title_encoder(tokenizer: Any, start_id: int, end_id: int, max_length: int) -> Callable[[list[str]], dict[str, list]]:
    """As `text_encoder`, for titles as a decoder's targets: at most `max_length` ids, the end behind them, no start before."""

    def encode(texts: list[str]) -> dict[str, list]:
        encoded = tokenizer(text_target=texts, **IDS_ALONE)["input_ids"]
        rows = [[token for i, token in enumerate(ids) if not (i == 0 and token == start_id)] for ids in encoded]
        rows = [ids[:-1] if ids and ids[-1] == end_id else ids for ids in rows]
        return {
            "input_ids": [[*ids[:max_length], end_id] for ids in rows],
            "cut": [len(ids) > max_length for ids in rows],
        }

    return encode


def note_unknown(tokens: RaggedChunks, tokenizer: Any, path: str, notes: list[str]) -> None:
    """Notes a file of which much is unknown to the tokenizer: it is probably one for another language."""
    total = int(tokens.lengths.sum())
    if tokenizer.unk_token_id is None or not total:
        return
    unknown = sum(int(np.count_nonzero(chunk.values == tokenizer.unk_token_id)) for chunk in tokens.chunks) / total
    if unknown > MUCH_UNKNOWN:
        notes.append(f"{path}: {unknown:.0%} of the tokens are unknown to the tokenizer; is it one for this language?")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of everything that decides which ids a text gets, its length apart."""
    stated = json.loads(tokenizer.backend_tokenizer.to_str())
    # These two remember the last call, so they differ between a process that tokenized and one that found the tokens.
    stated.pop("truncation", None)
    stated.pop("padding", None)
    words = [getattr(tokenizer, "hmm", None), getattr(tokenizer, "user_words", None)]  # those of a tokenizer by jieba
    return fingerprint([type(tokenizer).__name__, json.dumps(stated, sort_keys=True), tokenizer.truncation_side, repr(words)])


@dataclass(frozen=True)
class _Joined:
    """The cells of several columns, one column after the other, as often as one likes."""

    columns: Sequence[Column]

    def __len__(self) -> int:
        return sum(map(len, self.columns))

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self.columns)


def _trained(texts: Sequence[Column], vocab_size: int) -> Any:
    """Trains once per (texts, size) and machine."""
    from transformers import AutoTokenizer

    from text.vocabulary import train_tokenizer

    key = fingerprint([str(vocab_size), *(column.fingerprint for column in texts)])[:40]
    everything = _Joined(texts)
    folder = kept("vocabularies", key, lambda path: train_tokenizer(everything, vocab_size).save_pretrained(path))
    return AutoTokenizer.from_pretrained(folder)
