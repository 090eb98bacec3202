"""Texts -> tokens, once per (texts, tokenizer, settings).

`datasets` keeps the tokens in Arrow files that are mapped into memory, so a second start and every further process of a
machine tokenize nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.errors import InputError
from finetune.garbage_collection import paused
from finetune.output.progress import Phase
from finetune.reading.cache import kept
from finetune.reading.fingerprint import fingerprint
from finetune.reading.ragged import RaggedChunks
from finetune.reading.stored_rows import Column, open_dataset

Encode = Callable[[list[str]], dict[str, list]]
FORM = "3"  # of the stored tokens; another one tokenizes again
PARALLELISM = "TOKENIZERS_PARALLELISM"  # whether the tokenizers library uses threads


def encode_cached(texts: Column, encode: Encode, settings: str, num_proc: int | None = None) -> dict[str, Any]:
    """Tokenizes `texts` or finds their tokens on disk.

    `encode` turns a list of texts into columns: "input_ids" (a list of ids per text) and "cut" (whether it lost its end).
    `settings` names everything that its result depends on. Returns {"input_ids": RaggedChunks, mapped from the disk; "cut":
    (rows,) bool}. Raises `InputError` if a tokenizing process is killed.
    """
    key = fingerprint([FORM, settings, texts.fingerprint])[:40]
    folder = kept("tokens", key, lambda place: _tokenize(texts, encode, place, num_proc))
    found = open_dataset(folder).data
    return {"input_ids": RaggedChunks(found.column("input_ids")), "cut": found.column("cut").to_numpy()}


def _tokenize(texts: Column, encode: Encode, folder: Path, num_proc: int | None) -> None:
    """Writes Arrow files into the folder, one per process."""
    import datasets  # takes half a second: not for texts in memory
    from datasets import List, Value

    global _encode, _bar
    datasets.disable_progress_bars()  # they appear at once and in log files
    data = texts.dataset()
    processes = min(num_proc or 1, len(data))
    environment, parallelism = os.environ, os.environ.get(PARALLELISM)
    # A million lists, none of them in a cycle: collections took a fifth of the time of short texts.
    with paused(), Phase("tokenizing", "texts", len(data) // processes) as _bar:
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
                "a process that tokenizes was killed, perhaps for want of memory; give fewer --preprocessing_num_workers"
            ) from None
        finally:
            _encode = _bar = None
            # For several processes, `map` sets the variable and leaves a copy in the place of os.environ.
            os.environ = environment  # noqa: B003
            os.environ.pop(PARALLELISM, None)
            if parallelism is not None:
                os.environ[PARALLELISM] = parallelism


# Module variables, since forked processes inherit them, while arguments would be pickled: some tokenizers cannot be.
_encode: Encode | None = None
_bar: Any = None


def _encode_batch(texts: list[str], rank: int | None) -> dict[str, list]:
    """`rank`: of the tokenizing process, None where there is one only."""
    if rank is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all processes; the parent ends this one
    encoded = _encode(texts)
    if not rank:  # one process shows the progress of all: they have equal shares
        _bar.update(len(texts))
    return encoded
