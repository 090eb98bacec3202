"""Ragged arrays: rows of different lengths without a Python object per row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Ragged:
    """Rows in one array: row i is `values[offsets[i]:offsets[i + 1]]`, a view."""

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @staticmethod
    def of(rows: Sequence[Sequence[int]], dtype: str = "int32") -> Ragged:
        offsets = np.cumsum([0, *map(len, rows)])
        values = np.fromiter(chain.from_iterable(rows), dtype=dtype, count=int(offsets[-1]))
        return Ragged(values, offsets)


class RaggedChunks:
    """An Arrow column of lists, without a copy: one `Ragged` per chunk, a view of Arrow's buffers."""

    def __init__(self, lists: pa.ChunkedArray) -> None:
        """`lists`: of integers, without nulls."""
        self.chunks = [Ragged(chunk.values.to_numpy(), chunk.offsets.to_numpy()) for chunk in lists.chunks]
        self._ends = np.cumsum([len(chunk) for chunk in self.chunks]).tolist()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        number = bisect_right(self._ends, row)
        return self.chunks[number][row - self._ends[number] + len(self.chunks[number])]

    @property
    def values(self) -> np.ndarray:
        """The concatenated values of all rows, as a copy."""
        return np.concatenate([chunk.values[chunk.offsets[0] : chunk.offsets[-1]] for chunk in self.chunks])

    @cached_property
    def lengths(self) -> np.ndarray:
        """(rows,) int64"""
        return np.concatenate([chunk.lengths for chunk in self.chunks]).astype(np.int64)
