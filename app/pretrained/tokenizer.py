"""The tokenizer of a run, and the function that turns texts into ids."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.data import fingerprint
from finetune.failure import InputError
from pretrained.model import explain


def load_tokenizer(arguments: Any, train_texts: list[str]) -> Any:
    """The tokenizer that the arguments name: the model's, another one, or one trained on the training texts.

    Raises `InputError` when it cannot be found or has no padding token.
    """
    if arguments.tokenizer_type == "train":
        return _trained(train_texts, arguments.vocab_size)
    from transformers import AutoTokenizer

    name = arguments.tokenizer_name or arguments.model_name_or_path
    if name is None:
        raise InputError("no tokenizer: give --model_name_or_path, --tokenizer_name or --tokenizer_type train")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=arguments.trust_remote_code)
    except Exception as error:
        raise InputError(explain("tokenizer", name, error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(f"tokenizer {name}: its vocabulary is empty; the folder lacks tokenizer.json or a vocabulary file")
    if tokenizer.pad_token_id is None:
        raise InputError(f"tokenizer {name} has no padding token; add one to its tokenizer_config.json")
    return tokenizer


def text_encoder(tokenizer: Any, max_length: int) -> Callable[[list[str]], dict[str, list]]:
    """A function from texts to {"input_ids": ids per text, with special tokens; "cut": whether the text lost its end}."""

    def encode(texts: list[str]) -> dict[str, list]:
        encoded = tokenizer(texts, truncation=True, max_length=max_length, return_attention_mask=False)
        return {"input_ids": encoded["input_ids"], "cut": [bool(e.overflowing) for e in encoded.encodings]}

    return encode


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of everything that decides which ids a text gets, its length apart."""
    stated = json.loads(tokenizer.backend_tokenizer.to_str())
    # These two remember the last call, so they differ between a process that tokenized and one that found the tokens.
    stated.pop("truncation", None)
    stated.pop("padding", None)
    return fingerprint([json.dumps(stated, sort_keys=True), tokenizer.truncation_side])


def _trained(texts: list[str], vocab_size: int) -> Any:
    """Trains once per (texts, size) and machine; the processes that start together wait for the first."""
    import datasets
    from filelock import FileLock
    from transformers import AutoTokenizer

    from vocabulary.train import train_tokenizer

    folder = Path(datasets.config.HF_DATASETS_CACHE) / "vocabularies"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / fingerprint([str(vocab_size), *texts])[:40]
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            try:
                train_tokenizer(texts, vocab_size).save_pretrained(unfinished)
                os.rename(unfinished, path)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        return AutoTokenizer.from_pretrained(path)
