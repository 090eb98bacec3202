"""Rows of a file kept on disk as Arrow and mapped into memory: cells are Python objects only while they are looked at. Level 2.

A million texts as Python objects take longer to make than their file takes to read, and every process of a machine would hold
them. Mapped, they take no time and are in memory once, for as long as the system has room.

The file is a row of Arrow streams (https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format) of one block of
rows each, since json rows may show new fields at any line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from finetune.reading.blocks import BLOCK_ROWS, Block
from finetune.reading.fingerprint import GROUP, add_group, fingerprint

LINE = "line"  # the first column of every block; names are told apart by place, so a field may be called that too
JSON = {b"cells": b"json"}  # marks a column of a block whose cells are JSON documents, since not all of them are texts


@dataclass(frozen=True)
class Chunk:
    """Consecutive cells of a column. `array` is None where no row has one."""

    length: int
    array: pa.Array | None
    is_json: bool = False

    @property
    def is_text(self) -> bool:
        """Whether every cell is a text."""
        return self.array is not None and not (self.is_json or self.array.null_count) and _is_string(self.array)

    def take(self, places: np.ndarray) -> Chunk:
        if self.array is None:
            return Chunk(len(places), None, self.is_json)
        # Not pa.array, which imports pandas wherever it is installed: a third of a second.
        numbers = pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(np.ascontiguousarray(places, np.int64))])
        return Chunk(len(places), self.array.take(numbers), self.is_json)

    def cells(self) -> list[Any]:
        if self.array is None:
            return [None] * self.length
        cells = self.array.to_pylist()
        return list(map(json.loads, cells)) if self.is_json else cells

    def distinct(self) -> tuple[list[Any], np.ndarray]:
        """(the cells, those that are texts or JSON without repetition; (length,) the place of each row's cell among them)."""
        if self.array is not None and _is_string(self.array):
            encoded = self.array.dictionary_encode(null_encoding="encode")
            cells = Chunk(len(encoded.dictionary), encoded.dictionary, self.is_json).cells()
            return cells, np.from_dlpack(encoded.indices)  # to_numpy imports pandas, too
        return self.cells(), np.arange(self.length)

    @staticmethod
    def of(cells: Sequence[Any] | pa.Array) -> Chunk:
        """Raises RecursionError for cells that are nested too deeply to be written as JSON."""
        if isinstance(cells, pa.Array):
            return Chunk(len(cells), cells.cast(pa.large_string()) if pa.types.is_string(cells.type) else cells)
        is_json = not set(map(type, cells)) <= {str, type(None)}
        texts = [json.dumps(cell, ensure_ascii=False) for cell in cells] if is_json else cells
        return Chunk(len(cells), pa.array(texts, pa.large_string()), is_json)


class Column(Sequence[Any]):
    """Cells of a column. Equal to any other sequence of the same cells."""

    def __init__(self, chunks: Sequence[Chunk], rows: np.ndarray | None = None):
        """`rows`: which cells of the chunks these are, None for all."""
        self._chunks, self._rows = list(chunks), rows
        self._ends = np.cumsum([chunk.length for chunk in self._chunks], dtype=np.int64)
        self._length = (int(self._ends[-1]) if self._chunks else 0) if rows is None else len(rows)

    @staticmethod
    def of(cells: Sequence[Any] | pa.Array) -> Column:
        """A column in memory."""
        return Column([Chunk.of(cells)])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.take(np.arange(*row.indices(len(self))))
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return next(self.take(np.array([row % len(self)])).chunks()).cells()[0]

    def __iter__(self) -> Iterator[Any]:
        for chunk in self.chunks():
            yield from chunk.cells()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sequence)
            and len(self) == len(other)
            and all(mine == its for mine, its in zip(self, other, strict=True))
        )

    __hash__ = None

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"Column([{shown}{', ...' if len(self) > 3 else ''}], {len(self)} cells)"

    def take(self, rows: np.ndarray) -> Column:
        """The cells of these rows, in their order."""
        rows = np.asarray(rows, dtype=np.int64)
        return Column(self._chunks, rows if self._rows is None else self._rows[rows])

    def chunks(self) -> Iterator[Chunk]:
        """The cells in pieces of bounded size."""
        if self._rows is None:
            yield from self._chunks
            return
        for first in range(0, len(self._rows), BLOCK_ROWS):
            rows = self._rows[first : first + BLOCK_ROWS]
            numbers = np.searchsorted(self._ends, rows, side="right")
            changes = np.flatnonzero(np.diff(numbers)) + 1
            for start, end in zip([0, *changes], [*changes, len(rows)], strict=True):
                chunk = self._chunks[numbers[start]]
                yield chunk.take(rows[start:end] - (self._ends[numbers[start]] - chunk.length))

    @property
    def is_text(self) -> bool:
        """Whether every cell is a text."""
        return all(chunk.is_text for chunk in self._chunks) or all(chunk.is_text for chunk in self.chunks())

    def matches(self, pattern: str) -> np.ndarray:
        """(rows,) whether each of the cells, which are texts, matches a pattern in RE2's syntax."""
        import pyarrow.compute

        found = [pyarrow.compute.match_substring_regex(chunk.array, pattern) for chunk in self.chunks()]
        return np.concatenate([np.zeros(0, np.uint8), *(np.from_dlpack(part.cast(pa.uint8())) for part in found)]).astype(bool)

    @cached_property
    def fingerprint(self) -> str:
        """`fingerprint` of the cells, which are texts."""
        if not self.is_text:
            return fingerprint(self)
        digest = hashlib.sha256()
        for group in _groups(self.chunks(), GROUP):
            offsets = np.frombuffer(group.buffers()[1], np.int64)[group.offset : group.offset + len(group) + 1]
            data = group.buffers()[2]
            joined = memoryview(data)[offsets[0] : offsets[-1]] if data is not None else b""
            add_group(digest, np.diff(offsets), joined)
        return digest.hexdigest()

    def distinct(self) -> tuple[list[Any], np.ndarray]:
        """(the different cells in the order of their first appearance, (rows,) the number of each row's cell among them).

        1, 1.0 and True are different cells.
        """
        number: dict[Any, int] = {}
        cells: list[Any] = []
        codes = [np.zeros(0, np.int64)]
        for chunk in self.chunks():
            found, places = chunk.distinct()
            here = []
            for cell in found:
                key = cell if isinstance(cell, str) else (repr(cell),)
                here.append(number.setdefault(key, len(number)))
                cells += [cell] * (len(number) - len(cells))
            codes.append(np.array(here, dtype=np.int64)[places])
        return cells, np.concatenate(codes)


def write_rows(path: Path, kind: str, blocks: Iterable[Block]) -> None:
    """Writes blocks of rows, one after the other. `kind`: a word that is kept with them.

    Raises `TooDeepError` for a cell that is nested too deeply, and whatever the blocks' making raises.
    """
    with open(path, "wb") as file:
        for block in blocks:
            lines = pa.array(block.lines, pa.int64())
            fields, arrays = [pa.field(LINE, pa.int64())], [lines]
            for name, cells in block.columns.items():
                try:
                    chunk = Chunk.of(cells)
                except RecursionError:
                    raise TooDeepError(block.lines[_deepest(cells)]) from None
                fields.append(pa.field(name, chunk.array.type, metadata=JSON if chunk.is_json else None))
                arrays.append(chunk.array)
            schema = pa.schema(fields, metadata={"kind": kind})
            with pa.ipc.new_stream(file, schema) as stream:
                stream.write_batch(pa.record_batch(arrays, schema=schema))


class TooDeepError(Exception):
    """A cell is nested too deeply; `line` is that of its row."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


def open_rows(path: Path) -> tuple[str, dict[str, Column], Column]:
    """(their kind, the columns in the order in which they first appear, the line of each row) of rows that were written."""
    kind, lines, rows = "", [], 0
    columns: dict[str, list[Chunk]] = {}
    known: dict[str, int] = {}  # rows of each column so far
    with pa.memory_map(str(path)) as file:
        size = file.size()
        while file.tell() < size:
            stream = pa.ipc.open_stream(file)
            kind = stream.schema.metadata[b"kind"].decode()
            for batch in stream:
                lines.append(Chunk(len(batch), batch.column(0)))
                for field, array in list(zip(batch.schema, batch.columns, strict=True))[1:]:
                    chunks = columns.setdefault(field.name, [])
                    if missing := rows - known.get(field.name, 0):
                        chunks.append(Chunk(missing, None))
                    chunks.append(Chunk(len(batch), array, field.metadata == JSON))
                    known[field.name] = rows + len(batch)
                rows += len(batch)
    for name, chunks in columns.items():
        if missing := rows - known[name]:
            chunks.append(Chunk(missing, None))
    return kind, {name: Column(chunks) for name, chunks in columns.items()}, Column(lines)


def _is_string(array: pa.Array) -> bool:
    return pa.types.is_large_string(array.type)


def _deepest(cells: Sequence[Any]) -> int:
    for place, cell in enumerate(cells):
        try:
            json.dumps(cell)
        except RecursionError:
            return place
    raise AssertionError("no cell is nested too deeply")


def _groups(chunks: Iterable[Chunk], size: int) -> Iterator[pa.Array]:
    """The chunks' texts in arrays of `size`; the last may be smaller."""
    rest: list[pa.Array] = []
    count = 0
    for chunk in chunks:
        array, first = chunk.array, 0
        while first < len(array):
            piece = array.slice(first, size - count)
            rest, count, first = [*rest, piece], count + len(piece), first + len(piece)
            if count == size:
                yield pa.concat_arrays(rest)
                rest, count = [], 0
    if rest:
        yield pa.concat_arrays(rest)
