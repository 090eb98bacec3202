"""Rows in the Arrow files of `datasets`, mapped into memory: cells become Python objects only while they are read.

Values of JSON may have any type and change it from row to row. So a column is stored as two: its texts as they are and other
values as JSON documents in one, and which of them are JSON in the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.ipc

from finetune.errors import InputError
from finetune.reading.fingerprint import fingerprint
from finetune.reading.problems import described, place

if TYPE_CHECKING:
    from datasets import Dataset

LINE, CELLS, IS_JSON = "line", "cells", "is_json"  # the stored columns; the latter two for every column, with its number
BATCH_ROWS = 10_000  # stored together, or taken out of their order together
BATCH_CHARACTERS = 2**26  # the cells of a batch are in memory together

Row = tuple[int, dict[str, Any]]  # its line, and its cells by column


class Column(Sequence[Any]):
    """Cells of a column. Equal to any other sequence of the same cells."""

    def __init__(self, data: Dataset, name: str, is_json: str | None = None, rows: np.ndarray | None = None) -> None:
        """`name`: a column of `data` of any type; `is_json`: the column that says which of its texts are JSON documents;
        `rows`: the rows of `data` that these cells are of, None for all."""
        self._data, self._name, self._is_json, self._rows = data, name, is_json, rows
        self._stored = data.data.table.select([name] if is_json is None else [name, is_json])

    @staticmethod
    def of(cells: Iterable[Any]) -> Column:
        """A column in memory."""
        from datasets import Dataset  # takes half a second: not for rows that no file holds

        stored = [_stored(cell) for cell in cells]
        names = {CELLS: pa.large_string(), IS_JSON: pa.bool_()}
        table = {name: pa.array([pair[i] for pair in stored], kind) for i, (name, kind) in enumerate(names.items())}
        return Column(Dataset(pa.table(table)), CELLS, IS_JSON)

    @staticmethod
    def joined(columns: Sequence[Column]) -> Column:
        """Whole columns of stored rows, one after the other, without a copy. They have the same name in each."""
        import datasets

        first = columns[0]
        return Column(datasets.concatenate_datasets([column._data for column in columns]), first._name, first._is_json)

    def __len__(self) -> int:
        return len(self._stored if self._rows is None else self._rows)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.take(np.arange(*row.indices(len(self))))
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return next(iter(self.take(np.array([row % len(self)]))))

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches():
            yield from _cells(batch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None

    def take(self, rows: np.ndarray) -> Column:
        """The cells of these rows, in their order."""
        rows = np.asarray(rows, dtype=np.int64)
        return Column(self._data, self._name, self._is_json, rows if self._rows is None else self._rows[rows])

    def dataset(self) -> Dataset:
        """The cells, which are texts, as a dataset of one column."""
        data = self._data.select_columns([self._name])
        return data if self._rows is None else data.select(self._rows)

    @property
    def is_empty(self) -> bool:
        """Whether no row has a cell."""
        return self._stored.column(0).null_count == len(self._stored)

    @cached_property
    def is_text(self) -> bool:
        """Whether every cell is a text."""
        return all(map(_is_text, self._batches()))

    def matches(self, pattern: str) -> np.ndarray:
        """(rows,) bool: which of the cells, which are texts, match a pattern in RE2's syntax."""
        found = [pyarrow.compute.match_substring_regex(batch.column(0), pattern) for batch in self._batches()]
        return np.concatenate([np.zeros(0, bool), *(part.to_numpy(zero_copy_only=False) for part in found)])

    @cached_property
    def fingerprint(self) -> str:
        """`fingerprint` of the cells, which are texts."""
        return fingerprint(chain.from_iterable(_bytes(batch.column(0)) for batch in self._batches()))

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """The stored cells, some at a time."""
        if self._rows is None:
            yield from self._stored.to_batches()
            return
        for start in range(0, len(self._rows), BATCH_ROWS):
            rows = self._rows[start : start + BATCH_ROWS]
            first, last = int(rows.min()), int(rows.max())
            # Without the slice, Arrow would look through all the chunks of a large file each time.
            piece = self._stored.slice(first, last - first + 1).take(pa.array(rows - first))
            yield from piece.combine_chunks().to_batches()


def write_rows(
    folder: Path,
    path: str,
    kind: str,
    rows: Iterable[Row],
    columns: Sequence[str],
    *,
    where: Callable[[int], str] | None = None,
) -> None:
    """Stores the cells of `columns`, null where a row has none. `kind`: of the file `path`; `open_rows` gives it back. `where`:
    a line in words, if it is not of that file.

    Raises `InputError` for a cell that is neither a text nor a value of JSON, and whatever the iteration of `rows` raises.
    """
    fields = [(LINE, pa.int64())]
    for number in range(len(columns)):
        fields += [(f"{CELLS}_{number}", pa.large_string()), (f"{IS_JSON}_{number}", pa.bool_())]
    schema = pa.schema(fields)
    # The format of the files of `datasets`, written by Arrow: `Dataset.from_generator` takes 27 microseconds more for a row.
    with pa.ipc.new_stream(str(folder / f"{kind}.arrow"), schema) as stream:
        stored: list[list] = [[] for _ in schema]
        characters = 0
        for line, row in rows:
            stored[0].append(line)
            for number, name in enumerate(columns):
                try:
                    text, is_json = _stored(row.get(name))
                except InputError as error:
                    found = place(path, kind, line) if where is None else where(line)
                    raise InputError(f"{found}: {name} {error}") from None
                stored[2 * number + 1].append(text)
                stored[2 * number + 2].append(is_json)
                characters += len(text or "")
            if len(stored[0]) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
                stream.write_batch(pa.record_batch(list(map(pa.array, stored, schema.types)), schema))
                stored, characters = [[] for _ in schema], 0
        if stored[0]:
            stream.write_batch(pa.record_batch(list(map(pa.array, stored, schema.types)), schema))


def open_rows(folder: Path, columns: Sequence[str]) -> tuple[str, dict[str, Column], Column]:
    """(their kind, the columns, the line of each row) of rows that were written."""
    data = open_dataset(folder)
    stored = {name: Column(data, f"{CELLS}_{number}", f"{IS_JSON}_{number}") for number, name in enumerate(columns)}
    kind = next(folder.glob("*.arrow")).stem
    return kind, stored, Column(data, LINE)


def open_dataset(folder: Path) -> Dataset:
    """The rows of all the Arrow files in a folder."""
    import datasets

    files = [datasets.Dataset.from_file(str(file)) for file in sorted(folder.glob("*.arrow"))]
    return datasets.concatenate_datasets(files) if len(files) > 1 else files[0]


def _stored(cell: Any) -> tuple[str | None, bool]:
    """(the text, or the JSON document that stands for another value; whether it is JSON). None stays None. Raises `InputError`
    that says what is wrong with the cell."""
    if cell is None:
        return None, False
    try:
        text = cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)
        text.encode()
    except RecursionError:
        raise InputError("is nested too deeply") from None
    except TypeError:
        raise InputError(f"is {described(cell)}, expected a text, a number or a list") from None
    except UnicodeEncodeError:
        raise InputError("holds half of a character (a lone surrogate): remove or complete it") from None
    return text, not isinstance(cell, str)


def _cells(batch: pa.RecordBatch) -> list[Any]:
    cells = batch.column(0).to_pylist()
    if batch.num_columns == 1 or not batch.column(1).true_count:
        return cells
    flags = batch.column(1).to_pylist()
    # One document for all: a third of the time of one for each.
    values = iter(json.loads(f"[{','.join(cell for cell, is_json in zip(cells, flags, strict=True) if is_json)}]"))
    return [next(values) if is_json else cell for cell, is_json in zip(cells, flags, strict=True)]


def _is_text(batch: pa.RecordBatch) -> bool:
    cells = batch.column(0)
    is_string = pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)
    return is_string and not cells.null_count and not (batch.num_columns == 2 and batch.column(1).true_count)


def _bytes(texts: pa.Array) -> list[bytes]:
    return texts.cast(pa.large_binary()).to_pylist()
