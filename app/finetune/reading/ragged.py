"""Rows of different lengths without a Python object for each. Level 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np


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

    @property
    def row_numbers(self) -> np.ndarray:
        """(values,) the row that each value is in."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def take(self, rows: np.ndarray) -> Ragged:
        """The rows of these numbers, in their order; a row may be taken more than once."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return Ragged(self.values[places], offsets)

    @staticmethod
    def of(rows: Sequence[Sequence[int]], dtype: str = "int32") -> Ragged:
        offsets = np.cumsum([0, *map(len, rows)])
        values = np.fromiter(chain.from_iterable(rows), dtype=dtype, count=int(offsets[-1]))
        return Ragged(values, offsets)
