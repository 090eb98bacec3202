"""Files of rows, read strictly: csv, tsv, json, jsonl (and .gz of these), parquet.

No types are inferred: "NA", "007" and "1e5" in a csv stay text, json values keep the type they were written with. What
is wrong with a file is collected in one pass and reported together, each problem with its physical line. A file without
problems is read once on a machine: its rows are kept as stored_rows.py has them, under a hash of its bytes.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet

from finetune.errors import InputError
from finetune.output.files import file_record
from finetune.output.progress import counted
from finetune.reading.cache import kept
from finetune.reading.fingerprint import fingerprint
from finetune.reading.json_files import read_json
from finetune.reading.problems import Problems, listed, not_found, place, short
from finetune.reading.stored_rows import Column, Row, open_rows, write_rows
from finetune.reading.text_files import check_readable, text_lines

KINDS = {".csv": "csv", ".tsv": "tsv", ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
DELIMITERS = {"csv": ",", "tsv": "\t"}
FORM = "4"  # of the stored rows; another one reads files again

csv.field_size_limit(2**31 - 1)  # its own limit, 131072 characters, is below one long document


class Source(NamedTuple):
    """A file of a table of several. `argument`: which of the names or patterns that were given stands for it."""

    path: str
    kind: str
    argument: int


@dataclass(frozen=True)
class Table:
    """Rows as columns of equal length, and where each row stands in its file.

    `classes`: the names of a column of classes (a ClassLabel of `datasets`), all of them and in their order. A table of several
    files has `sources`, and for each row, (rows,), the number of its `source`.
    """

    path: str
    kind: str  # "csv", "tsv", "json" (one array), "jsonl" or "parquet": what the file holds, whatever its name says
    columns: dict[str, Column]
    lines: Column  # row i starts on this line of the file, from 1; in json and parquet, the number of the row from 1
    classes: dict[str, list[str]] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    source: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, i: int) -> str:
        """Row i in words for a message, see `problems.place`."""
        path, kind = (self.path, self.kind) if self.source is None else self.sources[self.source[i]][:2]
        return place(path, kind, self.lines[i])


def read_table(path: str, encoding: str = "utf-8", required: Sequence[str] = (), optional: Sequence[str] = ()) -> Table:
    """The rows of one file, by its extension: .csv .tsv .json .jsonl .ndjson .parquet, .gz of the text ones.

    The table has the `required` columns and those of the `optional` ones in which some row has a cell; others are not kept.
    Cells of csv and tsv are str; a cell that a row lacks is None. Blank lines are skipped. Raises InputError with the file's
    problems in the order of its rows, the first 20 and the count of the rest.
    """
    path = os.fspath(path)
    kind = kind_of(path)
    content, names = file_record(Path(path))["sha256"], list(dict.fromkeys([*required, *optional]))
    key = fingerprint([FORM, content, kind, encoding, str(len(required)), *required, *names])[:40]
    rows = partial(read_rows, path, encoding, required, names)
    folder = kept("rows", key, partial(_store, path, content, names, rows))
    found, columns, lines = open_rows(folder, names)
    there = {name: column for name, column in columns.items() if name in required or not column.is_empty}
    return Table(path, found, there, lines)


def kind_of(path: str) -> str:
    """The kind of file that its name stands for. Raises `InputError` unless it can be read and is not empty."""
    check_readable(path)
    stem, extension = os.path.splitext(path.lower())
    packed = extension == ".gz"
    kind = KINDS.get(os.path.splitext(stem)[1] if packed else extension)
    if kind is None or (packed and kind == "parquet"):
        raise InputError(
            f"{path}: unknown kind of file; known extensions: {' '.join(KINDS)}, and .gz after the text ones (.csv.gz)"
        )
    if os.path.getsize(path) == 0:
        raise InputError(f"{path}: no rows: the file is empty")
    return kind


def _store(path: str, content: str, names: Sequence[str], read: Callable[[], tuple[str, Iterator[Row]]], folder: Path) -> None:
    """Stores the columns of these names. `content`: the file's hash before it was read."""
    kind, rows = read()
    write_rows(folder, path, kind, counted(rows, f"reading {path}", "rows"), names)
    if file_record(Path(path))["sha256"] != content:
        raise InputError(f"{path}: changed while it was read: start again when it is whole")


def read_rows(path: str, encoding: str, required: Sequence[str], names: Sequence[str]) -> tuple[str, Iterator[Row]]:
    """(what the file holds, its rows). Raises InputError with what is wrong, behind the last row at the latest. `required`: the
    columns it must have; `names`: those that are looked at."""
    kind = kind_of(path)
    if kind == "parquet":
        return kind, _parquet_rows(path, required, names)
    if kind in DELIMITERS:
        return kind, _delimited_rows(path, encoding, kind, required, names)
    return read_json(path, encoding, required)


def _delimited_rows(path: str, encoding: str, kind: str, required: Sequence[str], names: Sequence[str]) -> Iterator[Row]:
    problems = Problems(path, kind)
    rows = _csv_rows(csv.reader(text_lines(path, encoding), delimiter=DELIMITERS[kind], strict=True), problems)
    header_line, header = next(((line, row) for line, row in rows if not _is_blank(row)), (0, []))
    problems.raise_any()  # a broken first line: nothing after it can be the column names
    if not header:
        raise InputError(f"{path}: no rows: only blank lines")
    _check_columns(header, required, names, problems, header_line)
    if len(header) == 1 and problems.total and (mark := next((mark for mark in "\t;|," if mark in header[0]), None)):
        problems.add(header_line, f"{mark!r} seems to separate the cells: save it with commas as .csv or with tabs as .tsv")
        problems.raise_any()  # every row would count as ragged
    width, found = len(header), False
    for line, row in rows:
        if _is_blank(row) and width > 1:
            continue
        found = True
        if len(row) != width:
            problems.add(
                line,
                f"{len(row)} cells, expected {width} ({listed(header)}); quote cells that contain "
                f"{DELIMITERS[kind]!r} or line breaks; the row begins {short(row[0])}",
            )
        elif width > 1 and row[1:] == header[1:] and row[0].removeprefix("\ufeff") == header[0]:
            problems.add(line, "the column names once more, as if files had been joined: remove this line")
        elif not problems.total:
            yield line, dict(zip(header, row, strict=True))
    if not found and not problems.total:
        problems.add(0, "no rows: only the line of column names")
    problems.raise_any()


def _is_blank(row: list[str]) -> bool:
    return len(row) == 1 and not row[0].strip()


def _csv_rows(reader: Any, problems: Problems) -> Iterator[tuple[int, list[str]]]:
    """(line on which the row starts, its cells), empty lines left out. Broken quotes end the reading: which line ends they have
    swallowed is anyone's guess."""
    line = 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            problems.add(line, 'a quote (") opened in this row is never closed')
        else:
            hint = f"; or is the delimiter not {reader.dialect.delimiter!r}?" if line == 1 else ""
            problems.add(
                line,
                f'text follows a closing quote on line {reader.line_num}; in a quoted cell write " as "", and quote a cell '
                f'that begins with " as a whole{hint}; the rest of the file is not checked',
            )


def _check_columns(found: list[str], required: Sequence[str], names: Sequence[str], problems: Problems, line: int) -> None:
    for name in names:
        if found.count(name) > 1:
            problems.add(line, f"column {short(name)} appears {found.count(name)} times: rename or remove all but one")
        elif name in required and name not in found:
            problems.add(line, not_found("column", name, found))


def _parquet_rows(path: str, required: Sequence[str], names: Sequence[str]) -> Iterator[Row]:
    problems, rows = Problems(path, "parquet"), 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            found = file.schema_arrow.names
            _check_columns(found, required, names, problems, 0)
            problems.raise_any()
            for batch in file.iter_batches(1000, columns=[name for name in names if name in found]):
                for row in batch.to_pylist():
                    rows += 1
                    yield rows, row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also of cells, such as broken UTF-8
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"{path}: not a whole parquet file ({reason}), behind row {rows}: write or copy it again") from None
    if not rows:
        raise InputError(f"{path}: no rows")
