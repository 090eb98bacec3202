"""Files of rows, read strictly: csv, tsv, json, jsonl (and .gz of these), parquet.

No types are inferred: "NA", "007" and "1e5" in a csv stay text, json values keep the type they were written with. What
is wrong with a file is collected in one pass and reported together, each problem with its physical line. A file without
problems is read once on a machine: its rows are kept as stored_rows.py has them, under a hash of its bytes.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from finetune.errors import InputError
from finetune.output.files import file_record
from finetune.reading.cache import kept
from finetune.reading.fingerprint import fingerprint
from finetune.reading.json_files import read_json
from finetune.reading.problems import Problems, listed, nearest, not_found, short
from finetune.reading.progress import progress
from finetune.reading.stored_rows import CellError, Column, Row, open_rows, write_rows
from finetune.reading.text_files import check_readable, text_lines

KINDS = {".csv": "csv", ".tsv": "tsv", ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
DELIMITERS = {"csv": ",", "tsv": "\t"}
CELL_LIMIT = 2**31 - 1  # csv's own limit, 131072 characters, is below one long document
FORM = "3"  # of the stored rows; another one reads files again


@dataclass(frozen=True)
class Table:
    """Rows as columns of equal length, and where each row stands in its file."""

    path: str
    kind: str  # "csv", "tsv", "json" (one array), "jsonl" or "parquet": what the file holds, whatever its name says
    columns: dict[str, Column]
    lines: Column  # row i starts on this line of the file, from 1; in parquet, the row number from 1

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, i: int) -> str:
        """Row i in words for a message: "train.csv:17", "train.json:17 (element 3)", "train.parquet row 17"."""
        element = (
            f" (element {self.lines.position(i) + 1})" if self.kind == "json" else ""
        )  # a whole array may stand on one line
        return f"{_place(self.path, self.kind, self.lines[i])}{element}"


def read_table(path: str, encoding: str = "utf-8", required: Sequence[str] = (), optional: Sequence[str] = ()) -> Table:
    """The rows of one file, by its extension: .csv .tsv .json .jsonl .ndjson .parquet, .gz of the text ones.

    The table has the `required` columns and those of the `optional` ones in which some row has a cell; others are not kept.
    Cells of csv and tsv are str; a cell that a row lacks is None. Blank lines are skipped. Raises InputError with the file's
    problems in line order, the first 20 and the count of the rest.
    """
    path = os.fspath(path)
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
    content, names = file_record(Path(path))["sha256"], list(dict.fromkeys([*required, *optional]))
    key = fingerprint([FORM, content, kind, encoding, str(len(required)), *required, *names])[:40]
    rows = partial(_rows, path, encoding, kind, required, names)
    folder = kept("rows", key, partial(_store, path, content, names, rows))
    found, columns, lines = open_rows(folder, names)
    there = {name: column for name, column in columns.items() if name in required or not column.is_empty}
    return Table(path, found, there, lines)


def _store(path: str, content: str, names: Sequence[str], read: Callable[[], tuple[str, Iterator[Row]]], folder: Path) -> None:
    """Stores the columns of these names. `content`: the file's hash before it was read."""
    kind, rows = read()
    try:
        write_rows(folder, kind, _counted(rows, path), names)
    except CellError as error:
        raise InputError(f"{_place(path, kind, error.line)}: {error}") from None
    if file_record(Path(path))["sha256"] != content:
        raise InputError(f"{path}: changed while it was read: start again when it is whole")


def _rows(path: str, encoding: str, kind: str, required: Sequence[str], names: Sequence[str]) -> tuple[str, Iterator[Row]]:
    """(what the file holds, its rows). Raises InputError with what is wrong, behind the last row at the latest."""
    if kind == "parquet":
        return kind, _parquet_rows(path, required, names)
    if kind in DELIMITERS:
        return kind, _delimited_rows(path, encoding, kind, required)
    return read_json(path, encoding, required)


def _place(path: str, kind: str, line: int) -> str:
    return f"{path} row {line}" if kind == "parquet" else f"{path}:{line}"


def _counted(rows: Iterable[Row], path: str) -> Iterator[Row]:
    with progress(f"reading {path}", "rows") as bar:
        for row in rows:
            yield row
            bar.update()


def _delimited_rows(path: str, encoding: str, kind: str, required: Sequence[str]) -> Iterator[Row]:
    problems = Problems(path)
    old_limit = csv.field_size_limit(CELL_LIMIT)  # a setting of the whole process, put back below
    try:
        reader = csv.reader(text_lines(path, encoding), delimiter=DELIMITERS[kind], strict=True)
        rows = _csv_rows(reader, problems)
        header_line, header = next(((line, row) for line, row in rows if not _is_blank(row)), (0, []))
        problems.raise_any()  # a broken first line: nothing after it can be the column names
        _check_header(header, header_line, kind, required, problems)
        found = False
        for line, row in _rows_of_width(rows, header, kind, problems):
            found = True
            if not problems.total:
                yield line, dict(zip(header, row, strict=True))
    finally:
        csv.field_size_limit(old_limit)
    if not found and not problems.total:
        problems.add(0, "no rows: only the line of column names" if header else "no rows: only blank lines")
    problems.raise_any()


def _is_blank(row: list[str]) -> bool:
    return len(row) == 1 and not row[0].strip()


def _csv_rows(reader, problems: Problems) -> Iterator[tuple[int, list[str]]]:
    """(line on which the row starts, its cells); empty lines and rows with broken quotes left out."""
    while True:
        line = reader.line_num + 1
        try:
            for row in reader:
                if row:
                    yield line, row
                line = reader.line_num + 1
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                problems.add(line, 'a quote (") opened in this row is never closed')
                return
            problems.add(
                line,
                f'text follows a closing quote on line {reader.line_num}; in a quoted cell write " as "", and quote a '
                'cell that begins with " as a whole'
                + (f"; or is the delimiter not {reader.dialect.delimiter!r}?" if line == 1 else ""),
            )
            if reader.line_num > line:
                # A stray quote has swallowed line ends: which lines are rows from here on is anyone's guess.
                problems.add(reader.line_num, "reading stopped here, the rest of the file is not checked")
                return


def _rows_of_width(
    rows: Iterable[tuple[int, list[str]]], header: list[str], kind: str, problems: Problems
) -> Iterator[tuple[int, list[str]]]:
    width = len(header)
    for line, row in rows:
        if len(row) == width:
            if width > 1 and (row == header or [row[0].removeprefix("\ufeff"), *row[1:]] == header):
                problems.add(line, "the column names once more, as if files had been joined: remove this line")
                continue
            yield line, row
        elif not _is_blank(row):
            comma = "commas" if kind == "csv" else "tabs"
            problems.add(
                line,
                f"{_count(len(row), 'cell')}, expected {width} ({listed(header)}); quote cells that contain {comma} "
                f"or line breaks; the row begins {short(row[0])}",
            )


def _check_header(header: list[str], line: int, kind: str, required: Sequence[str], problems: Problems) -> None:
    if not header:
        return
    places: dict[str, list[str]] = {}
    for number, name in enumerate(header, start=1):
        places.setdefault(name, []).append(str(number))
    for name, numbers in places.items():
        if len(numbers) > 1:
            column = f"column {short(name)} appears {len(numbers)} times" if name else "several columns have no name"
            problems.add(line, f"{column} (columns {listed(numbers)}): rename or remove all but one")
    missing = [name for name in required if name not in places]
    if missing and (advice := _not_this_kind(header, kind, missing)):
        problems.add(line, f"column {short(missing[0])} not found; found: {listed(header)}; {advice}")
        problems.raise_any()  # every row would count as ragged
    for name in missing:
        problems.add(line, not_found("column", name, header))
    if len(missing) == len(required) > 0 and not any(nearest(name, header) for name in missing):
        problems.add(line, "the first line must hold the column names: is it missing?")


def _not_this_kind(header: list[str], kind: str, missing: Sequence[str]) -> str | None:
    """What a file without its columns is instead, and what to do about it; None if that is not clear."""
    first = header[0].strip()
    if first.startswith(('{"', "[{")):
        return f"it holds JSON: name it .{'json' if first[0] == '[' else 'jsonl'}"
    if first.startswith("version https://git-lfs"):
        return "it is a pointer of Git LFS, not the file itself: fetch that with `git lfs pull`"
    if first.lower().startswith(("<!doctype", "<html", "<?xml")):
        return "it is a web page or XML, perhaps the error message of a download: download it again"
    if len(header) > 1:
        return None
    found = next((mark for mark in "\t;|," if set(missing) & {name.strip(' "') for name in first.split(mark)}), None)
    if found is None or found == DELIMITERS[kind]:
        return None
    right = {"\t": ".tsv", ",": ".csv"}.get(found)
    advice = f"name it {right}" if right else "save it with commas"
    return f"{found!r} seems to separate the cells, which a .{kind} file is not split at: {advice}"


def _parquet_rows(path: str, required: Sequence[str], names: Sequence[str]) -> Iterator[Row]:
    problems, rows = Problems(path), 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            found = file.schema_arrow.names
            for name in names:
                if found.count(name) > 1:
                    problems.add(0, f"column {short(name)} appears {found.count(name)} times: rename or remove all but one")
                elif name in required and name not in found:
                    problems.add(0, not_found("column", name, found))
            problems.raise_any()
            there = [name for name in names if name in found]
            for batch in file.iter_batches(1000, columns=there):
                columns = {name: _parquet_cells(path, name, batch.column(name), rows) for name in there}
                for i in range(len(batch)):
                    yield rows + i + 1, {name: cells[i] for name, cells in columns.items()}
                rows += len(batch)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: not a whole parquet file ({_first_line(error)}): write or copy it again") from None
    if not rows:
        raise InputError(f"{path}: no rows")


def _parquet_cells(path: str, name: str, cells: pyarrow.Array, rows: int) -> list[Any]:
    """Raises InputError with the row of the first cell that has no value in Python, such as broken UTF-8. `rows`: how many
    come before."""
    try:
        return cells.to_pylist()
    except Exception:  # pyarrow, datetime, decimal and codecs each have their own
        for row, cell in enumerate(cells, start=rows + 1):
            try:
                cell.as_py()
            except Exception as error:
                raise InputError(f"{path} row {row}: column {short(name)}: {_first_line(error)}") from None
        raise


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:120] if lines else type(error).__name__
