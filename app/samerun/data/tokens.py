"""Token ids, tokenized once per (texts, tokenizer, settings) and machine, and mapped into memory."""

from __future__ import annotations

import os
import signal
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from samerun.console import Phase
from samerun.data.cache import content_key, get_or_create
from samerun.data.tables import CellPairs, Cells, open_rows
from samerun.errors import InputError

FORMAT_VERSION = "3"  # of the cached tokens; part of their cache key
PARALLELISM = "TOKENIZERS_PARALLELISM"  # environment variable: whether the tokenizers library uses threads


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths. `chunks`: (values, offsets) each; row i of a chunk is
    `values[offsets[i]:offsets[i + 1]]`, a view."""

    chunks: list[tuple[np.ndarray, np.ndarray]]

    @staticmethod
    def of(rows: Sequence[Sequence[int]], dtype: str = "int32") -> Ragged:
        offsets = np.cumsum([0, *map(len, rows)])
        values = np.fromiter(chain.from_iterable(rows), dtype=dtype, count=int(offsets[-1]))
        return Ragged([(values, offsets)])

    @staticmethod
    def from_arrow(lists: pa.ChunkedArray) -> Ragged:
        """Views of Arrow's buffers. `lists`: of integers, without nulls."""
        return Ragged([(chunk.values.to_numpy(), chunk.offsets.to_numpy()) for chunk in lists.chunks])

    @cached_property
    def _ends(self) -> list[int]:
        return np.cumsum([len(offsets) - 1 for _, offsets in self.chunks]).tolist()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        number = bisect_right(self._ends, row)
        values, offsets = self.chunks[number]
        first = row - self._ends[number] + len(offsets) - 1
        return values[offsets[first] : offsets[first + 1]]

    @property
    def values(self) -> np.ndarray:
        """The concatenated values of all rows; a copy if there are several chunks."""
        parts = [values[offsets[0] : offsets[-1]] for values, offsets in self.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def offsets(self) -> np.ndarray:
        """(rows + 1,) int64: where each row begins in `values`."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @cached_property
    def lengths(self) -> np.ndarray:
        """(rows,) int64"""
        return np.concatenate([np.diff(offsets) for _, offsets in self.chunks]).astype(np.int64)


def encode_cached(
    texts: Cells | CellPairs,
    encode: Callable[..., dict[str, list]],
    settings: str,
    num_proc: int | None = None,
    has_types: bool = False,
) -> dict[str, Any]:
    """Tokenizes `texts`, or loads their tokens from the cache.

    `encode` maps a list of texts, or two lists of pairs, to columns: "input_ids" (a list of ids per text),
    "cut" (whether the text was truncated), with `has_types` "token_type_ids", and lists of numbers named by
    its `more_columns`, if it has this attribute. `settings`: everything that the result of `encode` depends
    on. Returns a `Ragged` for each column, and "cut", (rows,) bool; "token_type_ids" may be None. Raises
    `InputError` if a tokenizing process is killed.
    """
    key = content_key([FORMAT_VERSION, settings, texts.content_key])[:40]
    folder = get_or_create("tokens", key, partial(_tokenize, texts, encode, num_proc, has_types))
    tokens = open_rows(folder).data
    lists = {name: Ragged.from_arrow(tokens.column(name)) for name in tokens.column_names if name != "cut"}
    return {"token_type_ids": None, **lists, "cut": tokens.column("cut").to_numpy()}


def _tokenize(
    texts: Cells | CellPairs, encode: Callable, num_proc: int | None, has_types: bool, folder: Path
) -> None:
    """Writes one Arrow file per tokenizing process into the folder."""
    import datasets  # takes half a second; texts in memory do not need it
    from datasets import List, Value

    global _encode, _decoders, _bar
    datasets.disable_progress_bars()  # they would also appear in log files
    processes = min(num_proc or 1, len(texts))
    lists = ("input_ids", *getattr(encode, "more_columns", ()))
    features = {**dict.fromkeys(lists, List(Value("int32"))), "cut": Value("bool")}
    features |= {"token_type_ids": List(Value("int8"))} if has_types else {}
    environment, parallelism = os.environ, os.environ.get(PARALLELISM)
    with Phase("tokenizing", "texts", len(texts) // processes) as _bar:
        _encode, _decoders = encode, texts.decoders
        try:
            texts.rows.map(
                _encode_batch,
                with_rank=True,
                input_columns=texts.rows.column_names,
                remove_columns=texts.rows.column_names,
                batched=True,
                features=datasets.Features(features),
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
            _encode = _decoders = _bar = None
            # With several processes, `map` sets the variable and replaces os.environ by a copy.
            os.environ = environment  # noqa: B003
            os.environ.pop(PARALLELISM, None)
            if parallelism is not None:
                os.environ[PARALLELISM] = parallelism


# Module variables, because forked processes inherit them. Arguments would be pickled, which some tokenizers
# do not support.
_encode: Callable[..., dict[str, list]] | None = None
_decoders: tuple[Callable[[Any], str], ...] = ()
_bar: Any = None


def _encode_batch(*columns_and_rank: Any) -> dict[str, list]:
    """The cells of each column, and the rank of the tokenizing process; None if it is the only one."""
    *columns, rank = columns_and_rank
    if rank is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    encoded = _encode(*(list(map(decode, cells)) for decode, cells in zip(_decoders, columns, strict=True)))
    if not rank:  # all processes have equal shares, so the first one's progress stands for all
        _bar.update(len(columns[0]))
    return encoded
