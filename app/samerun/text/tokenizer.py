"""Loads or trains the tokenizer of a run, sets its languages, and encodes texts and titles."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from samerun.data.cache import fingerprint, get_or_create
from samerun.data.tables import Cells
from samerun.data.tokens import Ragged
from samerun.errors import InputError, listed, nearest
from samerun.models.pretrained import explain_failed_load
from samerun.text.chinese import backend_json, jieba_tokenizer
from samerun.text.vocabulary import train_tokenizer

MAX_UNKNOWN_SHARE = 0.1  # of the tokens of a file, special tokens included, before a note
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}_[A-Za-z]{2,4}")  # zh_CN of mBART, zho_Hans of NLLB
# Position ids of these models start at padding id + 1, so a text has fewer tokens than the position table has
# rows.
OFFSET_POSITIONS = {
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "longformer",
    "mpnet",
    "ibert",
    "data2vec-text",
}
# Unused lists take a third of the time for short texts: Rust uses all cores, but building Python lists only
# one.
IDS_ALONE = {"return_attention_mask": False, "return_token_type_ids": False}


def load_tokenizer(arguments: Any, train_texts: Sequence[Cells], notes: list[str]) -> Any:
    """The model's tokenizer, that of --tokenizer_name, or a new one trained on the columns `train_texts`.

    Raises `InputError` if the tokenizer cannot be loaded or has no padding token.
    """
    if arguments.tokenizer_type == "train":
        return _train_or_load(train_texts, arguments.vocab_size)
    name = arguments.tokenizer_name or arguments.model_name_or_path
    if name is None:
        raise InputError(
            "no tokenizer: give --model_name_or_path, --tokenizer_name or --tokenizer_type train"
        )
    try:
        if arguments.tokenizer_type == "jieba":
            tokenizer = jieba_tokenizer(name, arguments.user_dictionary, notes)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, **arguments.hub_options(name))
    except InputError:
        raise
    except Exception as error:
        raise InputError(explain_failed_load("tokenizer", name, error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(
            f"tokenizer {name}: its vocabulary is empty; the folder lacks tokenizer.json or a vocabulary file"
        )
    if tokenizer.pad_token_id is None:
        raise InputError(f"tokenizer {name} has no padding token; add one to its tokenizer_config.json")
    return tokenizer


def choose_max_length(requested: int | None, config: Any, tokenizer: Any, default: int = 512) -> int:
    """--max_length, or else the default, limited by the position table and the tokenizer. Raises `InputError`
    for a requested length above the limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and config.model_type in OFFSET_POSITIONS:
        positions -= (config.pad_token_id or 0) + 1
    # Models with relative positions have -1, tokenizers without a limit a number of 30 digits.
    limit = min(
        (n for n in (positions, tokenizer.model_max_length) if n is not None and 0 < n < 10**6), default=None
    )
    if requested is not None and limit is not None and requested > limit:
        raise InputError(
            f"--max_length {requested} is more than the model can read ({limit} tokens); give at most {limit}"
        )
    return requested or min(default, limit or default)


def set_languages(tokenizer: Any, arguments: Any) -> dict[str, int]:
    """Sets --source_lang and --target_lang on a multilingual tokenizer. Returns the settings that make a
    model write in the target language: `decoder_start_token_id` (mBART) or `forced_bos_token_id` (mBART-50,
    NLLB); {} without --source_lang.

    Raises `InputError` for a tokenizer without languages and for unknown language codes.
    """
    source, target = arguments.source_lang, arguments.target_lang or arguments.source_lang
    if source is None:
        return {}
    name = arguments.tokenizer_name or arguments.model_name_or_path
    codes = sorted(
        {
            str(token)
            for token in tokenizer.added_tokens_decoder.values()
            if LANGUAGE_CODE.fullmatch(str(token))
        }
    )
    if not hasattr(tokenizer, "src_lang") or not codes:
        raise InputError(
            f"--source_lang {source}: the tokenizer of {name} has no language codes; leave it out"
        )
    unknown = {
        arg: code for arg, code in {"source_lang": source, "target_lang": target}.items() if code not in codes
    }
    if unknown:
        raise InputError(*(_unknown_language(arg, code, codes, name) for arg, code in unknown.items()))
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    code = tokenizer.convert_tokens_to_ids(target)
    first = tokenizer(text_target="")["input_ids"][0]
    return {"forced_bos_token_id" if first == code else "decoder_start_token_id": code}


@dataclass(frozen=True)
class TextEncoder:
    """Texts -> {"input_ids": ids of each text with special tokens, "cut": whether it was truncated}.
    `prefix`: put before each text."""

    tokenizer: Any
    max_length: int
    prefix: str = ""

    def __call__(self, texts: list[str]) -> dict[str, list]:
        texts = [self.prefix + text for text in texts] if self.prefix else texts
        encoded = self.tokenizer(texts, truncation=True, max_length=self.max_length, **IDS_ALONE)
        return {"input_ids": encoded["input_ids"], "cut": [bool(e.overflowing) for e in encoded.encodings]}


@dataclass(frozen=True)
class TitleEncoder:
    """As `TextEncoder`, for titles as decoder targets: at most `max_length` ids and the end token, without
    the start token."""

    tokenizer: Any
    start_id: int
    end_id: int
    max_length: int

    def __call__(self, texts: list[str]) -> dict[str, list]:
        encoded = self.tokenizer(text_target=texts, **IDS_ALONE)["input_ids"]
        rows = [ids[1:] if ids and ids[0] == self.start_id else ids for ids in encoded]
        # mBART puts the language code after the end token; its decoder starts with it.
        rows = [ids[:-1] if ids[-2:-1] == [self.end_id] != ids[-1:] else ids for ids in rows]
        rows = [ids[:-1] if ids and ids[-1] == self.end_id else ids for ids in rows]
        return {
            "input_ids": [[*ids[: self.max_length], self.end_id] for ids in rows],
            "cut": [len(ids) > self.max_length for ids in rows],
        }


def note_unknown(tokens: Ragged, tokenizer: Any, path: str, notes: list[str]) -> None:
    """Notes a file with a large share of unknown tokens: the tokenizer is probably for another language."""
    total = int(tokens.lengths.sum())
    if tokenizer.unk_token_id is None or not total:
        return
    unknown = sum(np.count_nonzero(ids == tokenizer.unk_token_id) for ids, _ in tokens.chunks) / total
    if unknown > MAX_UNKNOWN_SHARE:
        notes.append(
            f"{path}: {unknown:.0%} of the tokens are unknown to the tokenizer; is it one for this language?"
        )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of everything that determines the ids of a text, except for the maximum length."""
    backend = json.loads(backend_json(tokenizer))
    # These two hold the settings of the last call. They depend on whether this process tokenized or read the
    # cache.
    backend.pop("truncation", None)
    backend.pop("padding", None)
    return fingerprint(
        [type(tokenizer).__name__, json.dumps(backend, sort_keys=True), tokenizer.truncation_side]
    )


def _unknown_language(argument: str, code: str, codes: list[str], name: str) -> str:
    near = nearest(code, codes)
    return (
        f"--{argument} {code}: {name} has no such language{f'; did you mean {near}?' if near else '.'} "
        f"It has {listed(codes)}"
    )


@dataclass(frozen=True)
class _Concatenated:
    """The cells of several columns, one column after the other. Unlike a generator it can be iterated
    twice."""

    columns: Sequence[Cells]

    def __len__(self) -> int:
        return sum(map(len, self.columns))

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self.columns)


def _train_or_load(texts: Sequence[Cells], vocab_size: int) -> Any:
    """A tokenizer trained on these texts; trained once per machine, then loaded from the cache."""
    key = fingerprint([str(vocab_size), *(column.fingerprint for column in texts)])[:40]
    corpus = _Concatenated(texts)
    folder = get_or_create(
        "vocabularies", key, lambda path: train_tokenizer(corpus, vocab_size).save_pretrained(path)
    )
    return AutoTokenizer.from_pretrained(folder)
