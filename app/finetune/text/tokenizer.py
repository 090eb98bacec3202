"""The tokenizer of a run, its languages if it is multilingual, and the encoders that turn texts into ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from finetune.errors import InputError
from finetune.models.pretrained import explain_failed_load
from finetune.reading.cache import get_or_create
from finetune.reading.fingerprint import fingerprint
from finetune.reading.problems import listed, nearest
from finetune.reading.ragged import RaggedChunks
from finetune.reading.stored_rows import Column
from finetune.text.chinese import backend_json, jieba_tokenizer
from finetune.text.vocabulary import train_tokenizer

MUCH_UNKNOWN = 0.1  # of the tokens; special tokens count as known
LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Za-z]{2,4}")  # zh_CN of mBART, zho_Hans of NLLB
# Unused lists take a third of the time of short texts: Rust uses all cores, making Python lists only one.
IDS_ALONE = {"return_attention_mask": False, "return_token_type_ids": False}


def load_tokenizer(arguments: Any, train_texts: Sequence[Column], notes: list[str]) -> Any:
    """The tokenizer that the arguments name: the model's, another one, or one trained on columns of training texts.

    Words of the user dictionary that change nothing are noted. Raises `InputError` when the tokenizer cannot be found or has no
    padding token.
    """
    if arguments.tokenizer_type == "train":
        return _trained(train_texts, arguments.vocab_size)
    name = arguments.tokenizer_name or arguments.model_name_or_path
    if name is None:
        raise InputError("no tokenizer: give --model_name_or_path, --tokenizer_name or --tokenizer_type train")
    # Importing transformers takes seconds; errors in arguments and files do not wait for it.
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
        raise InputError(f"tokenizer {name}: its vocabulary is empty; the folder lacks tokenizer.json or a vocabulary file")
    if tokenizer.pad_token_id is None:
        raise InputError(f"tokenizer {name} has no padding token; add one to its tokenizer_config.json")
    return tokenizer


def set_languages(tokenizer: Any, arguments: Any) -> dict[str, int]:
    """Tells a tokenizer --source_lang and --target_lang, which it is saved with, and returns what a model must be told so that
    its titles are in the target language: the token that the decoder starts with (mBART), or the first one that it writes
    (mBART-50, NLLB). {} where no language is given.

    Raises `InputError` for a tokenizer without languages, and for codes that it does not have.
    """
    source, target = arguments.source_lang, arguments.target_lang or arguments.source_lang
    if source is None:
        return {}
    name = arguments.tokenizer_name or arguments.model_name_or_path
    codes = sorted({str(token) for token in tokenizer.added_tokens_decoder.values() if LANGUAGE.fullmatch(str(token))})
    if not hasattr(tokenizer, "src_lang") or not codes:
        raise InputError(f"--source_lang {source}: the tokenizer of {name} has no language codes; leave it out")
    given = {"source_lang": source, "target_lang": target}
    wrong = [argument for argument, code in given.items() if code not in codes]
    if wrong:
        raise InputError(*(_unknown_language(argument, given[argument], codes, name) for argument in wrong))
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    code = tokenizer.convert_tokens_to_ids(target)
    first = tokenizer(text_target="")["input_ids"][0]
    return {"forced_bos_token_id" if first == code else "decoder_start_token_id": code}


@dataclass(frozen=True)
class TextEncoder:
    """Texts -> {"input_ids": ids per text, with special tokens; "cut": whether the text was truncated}. `prefix`: stands before
    each text."""

    tokenizer: Any
    max_length: int
    prefix: str = ""

    def __call__(self, texts: list[str]) -> dict[str, list]:
        texts = [self.prefix + text for text in texts] if self.prefix else texts
        encoded = self.tokenizer(texts, truncation=True, max_length=self.max_length, **IDS_ALONE)
        return {"input_ids": encoded["input_ids"], "cut": [bool(e.overflowing) for e in encoded.encodings]}


@dataclass(frozen=True)
class TitleEncoder:
    """As `TextEncoder`, for titles as a decoder's targets: at most `max_length` ids and the end token, without start token."""

    tokenizer: Any
    start_id: int
    end_id: int
    max_length: int

    def __call__(self, texts: list[str]) -> dict[str, list]:
        encoded = self.tokenizer(text_target=texts, **IDS_ALONE)["input_ids"]
        rows = [ids[1:] if ids and ids[0] == self.start_id else ids for ids in encoded]
        # mBART has the language behind the end, where the decoder starts with it.
        rows = [ids[:-1] if ids[-2:-1] == [self.end_id] != ids[-1:] else ids for ids in rows]
        rows = [ids[:-1] if ids and ids[-1] == self.end_id else ids for ids in rows]
        return {
            "input_ids": [[*ids[: self.max_length], self.end_id] for ids in rows],
            "cut": [len(ids) > self.max_length for ids in rows],
        }


def note_unknown(tokens: RaggedChunks, tokenizer: Any, path: str, notes: list[str]) -> None:
    """Notes a file of which much is unknown to the tokenizer: it is probably one for another language."""
    total = int(tokens.lengths.sum())
    if tokenizer.unk_token_id is None or not total:
        return
    unknown = sum(int(np.count_nonzero(chunk.values == tokenizer.unk_token_id)) for chunk in tokens.chunks) / total
    if unknown > MUCH_UNKNOWN:
        notes.append(f"{path}: {unknown:.0%} of the tokens are unknown to the tokenizer; is it one for this language?")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of everything that decides which ids a text gets, except for the length."""
    backend = json.loads(backend_json(tokenizer))
    # These two remember the last call, so they differ between a process that tokenized and one that loaded the tokens.
    backend.pop("truncation", None)
    backend.pop("padding", None)
    earlier = "[None, None]"  # keeps the fingerprints, and with them the tokens and checkpoints, of earlier versions
    return fingerprint([type(tokenizer).__name__, json.dumps(backend, sort_keys=True), tokenizer.truncation_side, earlier])


def _unknown_language(argument: str, code: str, codes: list[str], name: str) -> str:
    near = nearest(code, codes)
    return (
        f"--{argument} {code}: {name} has no such language{f'; did you mean {near}?' if near else '.'} It has {listed(codes)}"
    )


@dataclass(frozen=True)
class _Joined:
    """The cells of several columns, one column after the other; can be iterated more than once."""

    columns: Sequence[Column]

    def __len__(self) -> int:
        return sum(map(len, self.columns))

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self.columns)


def _trained(texts: Sequence[Column], vocab_size: int) -> Any:
    """The tokenizer trained on these texts: trained once per machine, then loaded from the cache."""
    key = fingerprint([str(vocab_size), *(column.fingerprint for column in texts)])[:40]
    everything = _Joined(texts)
    folder = get_or_create("vocabularies", key, lambda path: train_tokenizer(everything, vocab_size).save_pretrained(path))
    return AutoTokenizer.from_pretrained(folder)
