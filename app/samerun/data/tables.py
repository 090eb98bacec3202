"""Tables: the rows of files and data sets as a `datasets.Dataset`, each with its line, and checks of columns.

The rows of a valid file are cached in an Arrow file under a hash of its bytes, so a machine reads it only
once. Cells become Python objects only while they are read. Cells of a JSON column may have different types,
but an Arrow column has one: texts are stored as they are, other cells as JSON documents after a mark.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from samerun.console import counted
from samerun.data.cache import content_hash, content_key, get_or_create, hash_now
from samerun.data.files import DELIMITERS, Row, cell_of, class_columns, file_kind, location, read_rows
from samerun.errors import SHOWN, InputError, described, listed, raise_problems

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT_VERSION = "7"  # of the cached rows; part of their cache key
LINE, FILE = "__line__", "__file__"  # columns beside those of the file
JSON_MARK = "\0json\0"
BATCH_ROWS = 10_000
BATCH_CHARACTERS = 2**26  # limits the memory of a batch
BLANK = {"Zs", "Zl", "Zp", "Cc", "Cf"}  # categories of separators, control and format characters


class Cells(Sequence[Any]):
    """The cells of a column, decoded when they are read. `rows`: a dataset of this column alone."""

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows
        self._arrow = rows.with_format("arrow")
        (feature,) = rows.features.values()
        is_stored = getattr(feature, "dtype", None) == "large_string"
        self.decode = _from_stored if is_stored else partial(cell_of, class_names(feature))
        self.decoders = (self.decode,)  # of each column of `rows`

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.take(np.arange(len(self))[row])
        return self.decode(self._arrow[int(row)].column(0)[0].as_py())

    def __iter__(self) -> Iterator[Any]:
        for batch in self._arrow.iter(BATCH_ROWS):
            yield from map(self.decode, batch.column(0).to_pylist())

    def take(self, rows: np.ndarray) -> Cells:
        """The cells of these rows, in this order."""
        return Cells(self.rows.select(rows, new_fingerprint="selected"))

    @cached_property
    def content_key(self) -> str:
        """`content_key` of the cells. All of them must be texts."""
        return content_key(self)


class CellPairs:
    """The cells of two columns of texts of one table, for `encode_cached`."""

    def __init__(self, table: Table, names: tuple[str, str]) -> None:
        self.rows = table.rows.select_columns(list(names))
        self.parts = [table.columns[name] for name in self.rows.column_names]
        self.decoders = tuple(part.decode for part in self.parts)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def content_key(self) -> str:
        return content_key(part.content_key for part in self.parts)


class Source(NamedTuple):
    """One of a table's files. `argument`: the index of the name or pattern that matched it."""

    path: str
    kind: str
    argument: int


@dataclass(frozen=True)
class Table:
    """The rows of a file or a data set. `rows` has the columns, the line of each row, and, with several
    sources, the number of each row's source."""

    path: str
    kind: str  # of FILE_KINDS, by content: a .json file may be jsonl
    rows: Dataset
    classes: dict[str, list[str]] = field(default_factory=dict)  # class names of ClassLabels, by column
    sources: tuple[Source, ...] = ()  # the files of a table of several files

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def columns(self) -> dict[str, Cells]:
        return {name: self._cells(name) for name in self.names}

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [name for name in self.rows.column_names if name not in (LINE, FILE)]

    @cached_property
    def lines(self) -> Cells:
        """The first line of each row, from 1; in json and parquet files, the number of the row from 1."""
        return self._cells(LINE)

    @cached_property
    def source(self) -> np.ndarray:
        """(rows,) index into `sources`, which must not be empty."""
        return np.fromiter(self._cells(FILE), np.int32, len(self))

    def _cells(self, name: str) -> Cells:
        return Cells(self.rows.select_columns([name]))

    def where(self, row: int) -> str:
        """The location of a row for messages, see `files.location`."""
        return location(*self.source_of(row), self.lines[row])

    def source_of(self, row: int) -> tuple[str, str]:
        """(path, kind) of the file that a row is from."""
        return self.sources[self.source[row]][:2] if self.sources else (self.path, self.kind)

    def take(self, rows: np.ndarray) -> Table:
        """Some rows, with their original lines."""
        return replace(self, rows=self.rows.select(rows, new_fingerprint="selected"))


def read_table(
    path: str, encoding: str = "utf-8", required: Sequence[str] = (), optional: Sequence[str] = ()
) -> Table:
    """Reads the rows of one file of a kind in `files.FILE_KINDS`.

    The table has the `required` columns and the non-empty `optional` ones. Cells of csv and tsv files are
    str; missing cells are None. Blank lines are skipped, but for those of a csv or tsv file of one column, as
    spreadsheets write empty cells. Raises `InputError` with the first 20 problems.
    """
    path = os.fspath(path)
    kind = file_kind(path)
    content = content_hash(path)
    # Texts, targets, others: a CoNLL file has the first two.
    names = list(dict.fromkeys([*required[:1], *optional, *required[1:]]))
    key = content_key([FORMAT_VERSION, content, kind, encoding, str(len(required)), *required, *names])[:40]

    def store(folder: Path) -> None:
        kind, rows = read_rows(path, encoding, required, names)
        rows = counted(rows, f"reading {path}", "rows")
        write_rows(folder / f"{kind}.arrow", rows, names, partial(location, path, kind))
        if hash_now(path) != content:
            raise InputError(f"{path}: changed while it was read: start again when it is complete")

    folder = get_or_create("rows", key, store)
    rows, kind = open_rows(folder), next(folder.glob("*.arrow")).stem
    nulls = {name: rows.data.column(name).null_count for name in names}
    empty = [name for name in names if name not in required and nulls[name] == len(rows)]
    classes = {name: labels for name, labels in class_columns(path).items() if name in {*names} - {*empty}}
    return Table(path, kind, rows.remove_columns(empty) if empty else rows, classes)


def write_rows(path: Path, rows: Iterable[Row], columns: Sequence[str], where: Callable[[int], str]) -> None:
    """Writes the cells of `columns` and the lines of the rows to an Arrow file; missing cells become null.

    `where`: the location of a line for messages. Raises `InputError` for cells that are neither texts nor
    JSON values, and all errors of the iterator `rows`.
    """
    schema = pa.schema([*((name, pa.large_string()) for name in columns), (LINE, pa.int64())])
    # Twice as fast as `Dataset.from_generator`, which takes rows one by one.
    with pa.ipc.new_stream(str(path), schema) as stream:
        for cells in _batches(rows, columns, where):
            stream.write_batch(pa.record_batch(list(map(pa.array, cells, schema.types)), schema))


def _batches(
    rows: Iterable[Row], columns: Sequence[str], where: Callable[[int], str]
) -> Iterator[list[list]]:
    """Yields the stored cells of some rows: a list for each column, and the lines."""
    batch, characters = [[] for _ in (*columns, LINE)], 0
    for line, row in rows:
        for name, cells in zip(columns, batch, strict=False):
            try:
                cells.append(_to_stored(row.get(name)))
            except InputError as error:
                raise InputError(f"{where(line)}: {name} {error}") from None
            characters += len(cells[-1] or "")
        batch[-1].append(line)
        if len(batch[-1]) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [[] for _ in batch], 0
    if batch[-1]:
        yield batch


def open_rows(folder: Path) -> Dataset:
    """The rows of all the Arrow files in a folder, mapped into memory."""
    import datasets  # takes half a second; tasks without files do not need it

    parts = [datasets.Dataset.from_file(str(file)) for file in sorted(folder.glob("*.arrow"))]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def dataset_table(rows: Dataset, path: str, required: Sequence[str], optional: Sequence[str]) -> Table:
    """The table of a data set of `datasets`, which must have the required columns."""
    names = [name for name in dict.fromkeys([*required, *optional]) if name in rows.column_names]
    cells = {name: Cells(rows.select_columns([name])) for name in names}
    names = [x for x in names if x in required or any(cell is not None for cell in cells[x])]
    features = {name: class_names(rows.features[name]) for name in names}
    classes = {name: labels for name, labels in features.items() if labels is not None}
    lines = np.arange(1, len(rows) + 1)
    # Messages name rows of a data set as they name those of parquet files: by row numbers.
    rows = rows.add_column(LINE, lines).select_columns([*names, LINE])
    return Table(path, "parquet", rows, classes)


def _to_stored(cell: Any) -> str | None:
    """Raises `InputError` with the end of a message: "is ..."."""
    if cell is None:
        return None
    try:
        is_plain = isinstance(cell, str) and not cell.startswith(JSON_MARK)
        text = cell if is_plain else JSON_MARK + json.dumps(cell, ensure_ascii=False)
        text.encode()
    except RecursionError:
        raise InputError("is nested too deeply") from None
    except TypeError:
        raise InputError(f"is {described(cell)}, expected a text, a number or a list") from None
    except UnicodeEncodeError:
        raise InputError("holds half of a character (a lone surrogate): remove or complete it") from None
    return text


def _from_stored(text: str | None) -> Any:
    return json.loads(text[len(JSON_MARK) :]) if text and text.startswith(JSON_MARK) else text


def class_names(feature: Any) -> list[str] | None:
    """The class names of a ClassLabel or a list of ClassLabels; None for other features."""
    import datasets

    inner = feature if isinstance(feature, datasets.ClassLabel) else getattr(feature, "feature", None)
    return inner.names if isinstance(inner, datasets.ClassLabel) else None


# Columns


def split_off(table: Table, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training rows, validation rows): ascending row numbers, of which `share` at random are for validation.
    They depend on the seed and the number of rows alone. Raises `InputError` for fewer than two rows."""
    if len(table) < 2:
        raise InputError(
            f"{table.path}: has {len(table)} row(s), too few to take validation rows from; give "
            "--validation_file"
        )
    count = min(max(1, round(len(table) * share)), len(table) - 1)
    held_out = np.zeros(len(table), dtype=bool)
    held_out[np.random.default_rng([seed, 0]).permutation(len(table))[:count]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def texts_of(table: Table, column: str) -> Cells:
    """A column of texts. Raises `InputError` for cells of other types, each with its line."""
    cells = table.columns[column]
    raise_problems(
        [
            f"{table.where(row)}: {column} is {described(cell)}, expected a text"
            for row, cell in enumerate(cells)
            if not isinstance(cell, str)
        ]
    )
    return cells


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: only separators, control and format characters (as zero-width ones)."""
    if text[:1].isalnum():  # the usual case, ten times as fast
        return False
    return all(unicodedata.category(character) in BLANK for character in text)


def drop_blank(table: Table, column: str, notes: list[str]) -> Table:
    """Removes training rows without visible text and adds a note. Raises `InputError` if no row is left."""
    blank = [row for row, text in enumerate(texts_of(table, column)) if is_blank(text)]
    if len(blank) == len(table):
        raise InputError(f"{table.path}: every {column} is empty; nothing to train on")
    if not blank:
        return table
    shown = ", ".join(map(table.where, blank[:SHOWN])) + (", ..." if len(blank) > SHOWN else "")
    notes.append(f"{table.path}: {len(blank)} row(s) without a text left out ({shown})")
    return table.take(np.setdiff1d(np.arange(len(table)), blank))


def note_rows_in_quotes(table: Table, column: str, notes: list[str]) -> None:
    """Notes texts of csv and tsv files that seem to hold further rows: a quote that belongs to a text begins
    a cell, which ends at the next such quote."""
    found = []
    for row, text in enumerate(texts_of(table, column)):
        if "\n" not in text:  # quickly for most
            continue
        lines, mark = text.splitlines(), DELIMITERS.get(table.source_of(row)[1])
        has_tabs = mark == "\t" and mark in text
        # Two lines inside of the text, with as many commas each, as rows have.
        has_commas = mark == "," and len(lines) > 3 and len({line.count(mark) for line in lines[1:-1]}) == 1
        if has_tabs or (has_commas and mark in lines[1]):
            found.append(f"{table.where(row)} ({len(lines)} lines)")
    if found:
        notes.append(
            f'{column} seems to hold further rows in {", ".join(found[:SHOWN])}: double each quote (") of a '
            "text and quote the text, or save the file as jsonl"
        )


def without_blank(table: Table, columns: Iterable[str], notes: list[str]) -> Table:
    """The table without these columns if they are empty or, as in GLUE's test files, -1 throughout, with a
    note."""
    there = [name for name in table.names if name in columns]
    cells = chain(*(table.columns[name] for name in there))
    if not there or any(cell is not None and str(cell).strip() not in ("", "-1", "-1.0") for cell in cells):
        return table
    notes.append(f"{table.path}: {listed(there)} is empty or -1 in every row and not read")
    return replace(table, rows=table.rows.remove_columns(there))


def note_cut(table: Table, what: str, cut: np.ndarray, limit: int | str, notes: list[str]) -> None:
    """Adds a note about cut texts. `what`: their plural noun; `cut`: (rows,) bool; `limit`: in tokens."""
    if count := int(cut.sum()):
        share = f"{count} of {len(table)} {what} ({count / len(table):.1%})"
        notes.append(f"{table.path}: {share} are cut to {limit} tokens")


def note_repeated_texts(texts: Mapping[str, Iterable[str]], notes: list[str]) -> None:
    """Adds notes about training texts that are repeated, and about texts of a split that are also in an
    earlier one. `texts`: by split."""
    hashes = {split: list(map(hash, column)) for split, column in texts.items()}
    known = {split: set(column) for split, column in hashes.items()}
    if repeated := len(hashes["train"]) - len(known["train"]):
        notes.append(f"{repeated} training row(s) repeat the text of an earlier row")
    for split, other in (("validation", "train"), ("test", "train"), ("test", "validation")):
        if shared := sum(value in known.get(other, ()) for value in hashes.get(split, [])):
            what = other.replace("train", "training")
            notes.append(f"{shared} of {len(hashes[split])} {split} texts are in the {what} rows too")


def ids_of(table: Table, column: str) -> Sequence[Any]:
    """The ids of the rows in predictions: the cells of `column`, or row numbers from 0."""
    return table.columns.get(column, range(len(table)))


def check_ids(table: Table, column: str) -> None:
    """Raises `InputError` for ids that cannot be written as JSON, before any work is done."""
    wrong = []
    for row, value in enumerate(table.columns.get(column, [])):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            wrong.append(f"{table.where(row)}: {column} is {described(value)}, expected a text or a number")
    raise_problems(wrong)
