"""Rows in Arrow files, mapped into memory. Cells become Python objects only while they are read.

JSON values of one column may have different types, but Arrow columns have one. So each column is stored as
two: "cells" has texts as they are and other values as JSON documents, and "is_json" tells them apart.
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

from samerun.errors import InputError
from samerun.reading.fingerprint import fingerprint
from samerun.reading.problems import described, location

if TYPE_CHECKING:
    from datasets import Dataset

LINE, CELLS, IS_JSON = (
    "line",
    "cells",
    "is_json",
)  # names of the stored columns: line, cells_0, is_json_0, cells_1, ...
BATCH_ROWS = 10_000
BATCH_CHARACTERS = 2**26  # limits the memory of a batch

Row = tuple[int, dict[str, Any]]  # (line, cells by column)


class Column(Sequence[Any]):
    """The cells of a column. Equal to any sequence with equal cells."""

    def __init__(
        self, data: Dataset, name: str, is_json: str | None = None, rows: np.ndarray | None = None
    ) -> None:
        """`name`: a column of `data`; `is_json`: the boolean column that marks JSON documents; `rows`: the
        selected rows of `data`, all by default."""
        self._data, self._name, self._is_json, self._rows = data, name, is_json, rows
        self._stored = data.data.table.select([name] if is_json is None else [name, is_json])

    @staticmethod
    def of(cells: Iterable[Any]) -> Column:
        """A column in memory."""
        from datasets import Dataset  # takes half a second; tasks without files do not need it

        stored = [_stored(cell) for cell in cells]
        texts = pa.array([text for text, _ in stored], pa.large_string())
        is_json = pa.array([is_json for _, is_json in stored], pa.bool_())
        return Column(Dataset(pa.table({CELLS: texts, IS_JSON: is_json})), CELLS, IS_JSON)

    @staticmethod
    def concatenate(columns: Sequence[Column]) -> Column:
        """Concatenates whole columns of the same name, without a copy."""
        import datasets

        first = columns[0]
        return Column(
            datasets.concatenate_datasets([column._data for column in columns]), first._name, first._is_json
        )

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
        """The cells of these rows, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        return Column(self._data, self._name, self._is_json, rows if self._rows is None else self._rows[rows])

    def dataset(self) -> Dataset:
        """The cells as a dataset of one column. All of them must be texts."""
        data = self._data.select_columns([self._name])
        return data if self._rows is None else data.select(self._rows)

    @property
    def is_empty(self) -> bool:
        """Whether all cells are missing."""
        return self._stored.column(0).null_count == len(self._stored)

    @cached_property
    def is_text(self) -> bool:
        """Whether every cell is a text."""
        return all(map(_is_text, self._batches()))

    def matches(self, pattern: str) -> np.ndarray:
        """(rows,) bool: which texts match a pattern in RE2's syntax. All cells must be texts."""
        matches = [
            pyarrow.compute.match_substring_regex(batch.column(0), pattern) for batch in self._batches()
        ]
        return np.concatenate([np.zeros(0, bool), *(part.to_numpy(zero_copy_only=False) for part in matches)])

    @cached_property
    def fingerprint(self) -> str:
        """`fingerprint` of the cells. All of them must be texts."""
        return fingerprint(chain.from_iterable(_bytes(batch.column(0)) for batch in self._batches()))

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """The stored cells in pieces."""
        if self._rows is None:
            yield from self._stored.to_batches()
            return
        for start in range(0, len(self._rows), BATCH_ROWS):
            rows = self._rows[start : start + BATCH_ROWS]
            first, last = int(rows.min()), int(rows.max())
            # Without the slice, Arrow searches all chunks of a large file each time.
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
    """Stores the cells of `columns`; missing cells become null.

    `kind`: of the file `path`; `open_rows` returns it. `where`: formats a row's location for messages, by
    default as a line of `path`. Raises `InputError` for cells that are neither texts nor JSON values, and all
    errors of the iterator `rows`.
    """
    fields = [(LINE, pa.int64())]
    for number in range(len(columns)):
        fields += [(f"{CELLS}_{number}", pa.large_string()), (f"{IS_JSON}_{number}", pa.bool_())]
    schema = pa.schema(fields)
    # The file format of `datasets`, written by Arrow itself: `Dataset.from_generator` takes 27 microseconds
    # more per row.
    with pa.ipc.new_stream(str(folder / f"{kind}.arrow"), schema) as stream:
        stored: list[list] = [[] for _ in schema]
        characters = 0
        for line, row in rows:
            stored[0].append(line)
            for number, name in enumerate(columns):
                try:
                    text, is_json = _stored(row.get(name))
                except InputError as error:
                    prefix = location(path, kind, line) if where is None else where(line)
                    raise InputError(f"{prefix}: {name} {error}") from None
                stored[2 * number + 1].append(text)
                stored[2 * number + 2].append(is_json)
                characters += len(text or "")
            if len(stored[0]) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
                stream.write_batch(pa.record_batch(list(map(pa.array, stored, schema.types)), schema))
                stored, characters = [[] for _ in schema], 0
        if stored[0]:
            stream.write_batch(pa.record_batch(list(map(pa.array, stored, schema.types)), schema))


def open_rows(folder: Path, columns: Sequence[str]) -> tuple[str, dict[str, Column], Column]:
    """Opens the files of `write_rows`. Returns (kind, columns by name, line of each row)."""
    data = open_dataset(folder)
    stored = {
        name: Column(data, f"{CELLS}_{number}", f"{IS_JSON}_{number}") for number, name in enumerate(columns)
    }
    kind = next(folder.glob("*.arrow")).stem
    return kind, stored, Column(data, LINE)


def open_dataset(folder: Path) -> Dataset:
    """The rows of all the Arrow files in a folder."""
    import datasets

    files = [datasets.Dataset.from_file(str(file)) for file in sorted(folder.glob("*.arrow"))]
    return datasets.concatenate_datasets(files) if len(files) > 1 else files[0]


def _stored(cell: Any) -> tuple[str | None, bool]:
    """Returns (text or JSON document, whether it is JSON). Raises `InputError` with the end of a message: "is
    ..."."""
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
    # One large JSON document takes a third of the time of many small ones.
    values = iter(
        json.loads(f"[{','.join(cell for cell, is_json in zip(cells, flags, strict=True) if is_json)}]")
    )
    return [next(values) if is_json else cell for cell, is_json in zip(cells, flags, strict=True)]


def _is_text(batch: pa.RecordBatch) -> bool:
    cells = batch.column(0)
    is_string = pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)
    return is_string and not cells.null_count and not (batch.num_columns == 2 and batch.column(1).true_count)


def _bytes(texts: pa.Array) -> list[bytes]:
    return texts.cast(pa.large_binary()).to_pylist()
