"""Strict readers of csv, tsv, json, jsonl (each also as .gz) and parquet files.

No types are inferred: "NA", "007" and "1e5" in a csv file stay text, and json values keep their types. One
pass collects all problems of a file, each with its physical line. The rows of a valid file are cached under a
hash of its bytes, so a machine reads it only once.
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

from samerun.errors import InputError
from samerun.output.files import file_record
from samerun.output.progress import counted
from samerun.reading.cache import content_hash, get_or_create
from samerun.reading.fingerprint import fingerprint
from samerun.reading.json_files import read_json
from samerun.reading.problems import Problems, listed, location, not_found, quoted
from samerun.reading.stored_rows import Column, Row, open_rows, write_rows
from samerun.reading.text_files import check_readable, text_lines

KINDS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
DELIMITERS = {"csv": ",", "tsv": "\t"}
FORMAT_VERSION = "4"  # of the cached rows; part of their cache key

csv.field_size_limit(2**31 - 1)  # the default, 131072 characters, is too small for long documents


class Source(NamedTuple):
    """One of a table's files. `argument`: the index of the name or pattern that matched it."""

    path: str
    kind: str
    argument: int


@dataclass(frozen=True)
class Table:
    """Columns of equal length, and the location of each row in its file."""

    path: str
    kind: str  # "csv", "tsv", "json" (one array), "jsonl" or "parquet", by content: a .json file may be jsonl
    columns: dict[str, Column]
    lines: Column  # first line of each row, from 1; in json and parquet, the number of the row from 1
    classes: dict[str, list[str]] = field(
        default_factory=dict
    )  # class names by column, of ClassLabels of `datasets`
    sources: tuple[Source, ...] = ()  # the files of a table of several files
    source: np.ndarray | None = None  # (rows,) index into `sources`

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, i: int) -> str:
        """The location of row i for messages, see `problems.location`."""
        path, kind = (self.path, self.kind) if self.source is None else self.sources[self.source[i]][:2]
        return location(path, kind, self.lines[i])


def read_table(
    path: str, encoding: str = "utf-8", required: Sequence[str] = (), optional: Sequence[str] = ()
) -> Table:
    """Reads the rows of one file. Its extension selects the reader: .csv .tsv .json .jsonl .ndjson .parquet;
    .gz of text files.

    The table has the `required` columns and the non-empty `optional` ones. Cells of csv and tsv files are
    str; missing cells are None. Blank lines are skipped. Raises `InputError` with the first 20 problems and
    the number of the others.
    """
    path = os.fspath(path)
    kind = kind_of(path)
    content, names = content_hash(path), list(dict.fromkeys([*required, *optional]))
    key = fingerprint([FORMAT_VERSION, content, kind, encoding, str(len(required)), *required, *names])[:40]
    rows = partial(read_rows, path, encoding, required, names)
    folder = get_or_create("rows", key, partial(_store, path, content, names, rows))
    kind, columns, lines = open_rows(folder, names)
    columns = {name: column for name, column in columns.items() if name in required or not column.is_empty}
    return Table(path, kind, columns, lines)


def kind_of(path: str) -> str:
    """The kind of a file by its name. Raises `InputError` for unknown names, unreadable files and empty
    files."""
    check_readable(path)
    stem, extension = os.path.splitext(path.lower())
    is_gzip = extension == ".gz"
    kind = KINDS.get(os.path.splitext(stem)[1] if is_gzip else extension)
    if kind is None or (is_gzip and kind == "parquet"):
        raise InputError(
            f"{path}: unknown kind of file; known extensions: {' '.join(KINDS)}, and .gz after the "
            "text ones (.csv.gz)"
        )
    if os.path.getsize(path) == 0:
        raise InputError(f"{path}: no rows: the file is empty")
    return kind


def _store(
    path: str, content: str, names: Sequence[str], read: Callable[[], tuple[str, Iterator[Row]]], folder: Path
) -> None:
    """Stores the columns `names`. `content`: the hash of the file before reading."""
    kind, rows = read()
    write_rows(folder, path, kind, counted(rows, f"reading {path}", "rows"), names)
    if file_record(Path(path))["sha256"] != content:
        raise InputError(f"{path}: changed while it was read: start again when it is complete")


def read_rows(
    path: str, encoding: str, required: Sequence[str], names: Sequence[str]
) -> tuple[str, Iterator[Row]]:
    """Returns (kind, iterator of the rows). `required`: the necessary columns; `names`: all columns to read
    and check.

    Raises `InputError` with all problems, at the end of the iterator at the latest.
    """
    kind = kind_of(path)
    if kind == "parquet":
        return kind, _parquet_rows(path, required, names)
    if kind in DELIMITERS:
        return kind, _delimited_rows(path, encoding, kind, required, names)
    return read_json(path, encoding, required)


def _delimited_rows(
    path: str, encoding: str, kind: str, required: Sequence[str], names: Sequence[str]
) -> Iterator[Row]:
    problems = Problems(path, kind)
    rows = _csv_rows(
        csv.reader(text_lines(path, encoding), delimiter=DELIMITERS[kind], strict=True), problems
    )
    header_line, header = next(((line, row) for line, row in rows if not _is_blank(row)), (0, []))
    problems.raise_any()  # the first line is broken
    if not header:
        raise InputError(f"{path}: no rows: only blank lines")
    _check_columns(header, required, names, problems, header_line)
    if (
        len(header) == 1
        and problems.total
        and (mark := next((mark for mark in "\t;|," if mark in header[0]), None))
    ):
        problems.add(
            header_line,
            f"{mark!r} seems to separate the cells: save it with commas as .csv or with tabs as .tsv",
        )
        problems.raise_any()  # otherwise each row would be reported
    width, is_empty = len(header), True
    for line, row in rows:
        if _is_blank(row) and width > 1:
            continue
        is_empty = False
        if len(row) != width:
            problems.add(
                line,
                f"{len(row)} cells, expected {width} ({listed(header)}); quote cells that contain "
                f"{DELIMITERS[kind]!r} or line breaks; the row begins {quoted(row[0])}",
            )
        elif width > 1 and row[1:] == header[1:] and row[0].removeprefix("\ufeff") == header[0]:
            problems.add(line, "the column names again, as if files had been joined: remove this line")
        elif not problems.total:
            yield line, dict(zip(header, row, strict=True))
    if is_empty and not problems.total:
        problems.add(0, "no rows: only the line of column names")
    problems.raise_any()


def _is_blank(row: list[str]) -> bool:
    return len(row) == 1 and not row[0].strip()


def _csv_rows(reader: Any, problems: Problems) -> Iterator[tuple[int, list[str]]]:
    """Yields (first line, cells) of each row that is not empty. Stops at broken quotes: the following rows
    are uncertain."""
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
                f'text follows a closing quote on line {reader.line_num}; in a quoted cell write " '
                'as "", and quote a cell '
                f'that begins with " as a whole{hint}; the rest of the file is not checked',
            )


def _check_columns(
    header: list[str], required: Sequence[str], names: Sequence[str], problems: Problems, line: int
) -> None:
    for name in names:
        if header.count(name) > 1:
            problems.add(
                line,
                f"column {quoted(name)} appears {header.count(name)} times: rename or remove all but one",
            )
        elif name in required and name not in header:
            problems.add(line, not_found("column", name, header))


def _parquet_rows(path: str, required: Sequence[str], names: Sequence[str]) -> Iterator[Row]:
    problems, rows = Problems(path, "parquet"), 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            header = file.schema_arrow.names
            _check_columns(header, required, names, problems, 0)
            problems.raise_any()
            for batch in file.iter_batches(1000, columns=[name for name in names if name in header]):
                for row in batch.to_pylist():
                    rows += 1
                    yield rows, row
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        OverflowError,
    ) as error:  # also from cells, such as broken UTF-8
        reason = " ".join(str(error).split())[:120]
        raise InputError(
            f"{path}: not a valid parquet file ({reason}), after row {rows}: write or copy it again"
        ) from None
    if not rows:
        raise InputError(f"{path}: no rows")
