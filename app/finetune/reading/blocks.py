"""Rows on their way from a file, some at a time. Level 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

BLOCK_ROWS = 10_000
BLOCK_CHARACTERS = 2**26  # the cells of a block are in memory together


@dataclass(frozen=True)
class Block:
    """Some rows in their order: the line of each, and the columns. A column of which no row has a cell is left out."""

    lines: Sequence[int]
    columns: dict[str, Sequence[Any] | pyarrow.Array]
