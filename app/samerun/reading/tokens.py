"""Tokenizes texts once per (texts, tokenizer, settings) and machine.

The tokens are cached in Arrow files and mapped into memory, so later starts and other processes do not
tokenize again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samerun.console import Phase
from samerun.errors import InputError
from samerun.reading.cache import get_or_create
from samerun.reading.fingerprint import fingerprint
from samerun.reading.ragged import RaggedChunks
from samerun.reading.stored_rows import Column, open_dataset

Encode = Callable[[list[str]], dict[str, list]]
FORMAT_VERSION = "3"  # of the cached tokens; part of their cache key
PARALLELISM = "TOKENIZERS_PARALLELISM"  # environment variable: whether the tokenizers library uses threads


def encode_cached(
    texts: Column, encode: Encode, settings: str, num_proc: int | None = None
) -> dict[str, Any]:
    """Tokenizes `texts`, or loads their tokens from the cache.

    `encode` maps a list of texts to columns: "input_ids" (a list of ids per text) and "cut" (whether the text
    was truncated). `settings`: everything that the result of `encode` depends on. Returns {"input_ids":
    RaggedChunks, "cut": (rows,) bool}. Raises `InputError` if a tokenizing process is killed.
    """
    key = fingerprint([FORMAT_VERSION, settings, texts.fingerprint])[:40]
    tokens = open_dataset(
        get_or_create("tokens", key, lambda folder: _tokenize(texts, encode, folder, num_proc))
    ).data
    return {"input_ids": RaggedChunks(tokens.column("input_ids")), "cut": tokens.column("cut").to_numpy()}


def _tokenize(texts: Column, encode: Encode, folder: Path, num_proc: int | None) -> None:
    """Writes one Arrow file per tokenizing process into the folder."""
    import datasets  # takes half a second; cached tokens and texts in memory do not need it
    from datasets import List, Value

    global _encode, _bar
    datasets.disable_progress_bars()  # they would also appear in log files
    data = texts.dataset()
    processes = min(num_proc or 1, len(data))
    environment, parallelism = os.environ, os.environ.get(PARALLELISM)
    with Phase("tokenizing", "texts", len(data) // processes) as _bar:
        _encode = encode
        try:
            data.map(
                _encode_batch,
                with_rank=True,
                input_columns=data.column_names,
                remove_columns=data.column_names,
                batched=True,
                features=datasets.Features({"input_ids": List(Value("int32")), "cut": Value("bool")}),
                cache_file_name=str(folder / "tokens.arrow"),
                new_fingerprint="tokens",
                num_proc=processes if processes > 1 else None,
            )
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            raise InputError(
                "a tokenizing process was killed, perhaps because memory ran out; use fewer "
                "--preprocessing_num_workers"
            ) from None
        finally:
            _encode = _bar = None
            # With several processes, `map` sets the variable and replaces os.environ by a copy.
            os.environ = environment  # noqa: B003
            os.environ.pop(PARALLELISM, None)
            if parallelism is not None:
                os.environ[PARALLELISM] = parallelism


# Module variables, because forked processes inherit them. Arguments would be pickled, which some tokenizers
# do not support.
_encode: Encode | None = None
_bar: Any = None


def _encode_batch(texts: list[str], rank: int | None) -> dict[str, list]:
    """`rank`: of the tokenizing process; None if it is the only one."""
    if rank is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    encoded = _encode(texts)
    if not rank:  # all processes have equal shares, so the first one's progress stands for all
        _bar.update(len(texts))
    return encoded
