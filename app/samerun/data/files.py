"""Strict readers of csv, tsv, json, jsonl, CoNLL (each also as .gz) and parquet files.

No types are inferred: "NA", "007" and "1e5" in a csv file stay text, and json values keep their types. One
pass collects all problems of a file, each with its physical line. Files are decoded with `--encoding` only.
If that fails, the encoding is guessed for the error message.
"""

import codecs
import csv
import glob
import gzip
import io
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from samerun.errors import SHOWN, InputError, listed, nearest, not_found, quoted
from samerun.files import read_text

FILE_KINDS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    **dict.fromkeys((".conll", ".bio", ".iob"), "conll"),
}
DELIMITERS = {"csv": ",", "tsv": "\t"}
UNITS = {"parquet": " row ", "json": " element "}  # what a "line" is where it is none of the file
JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
OTHER_FORMATS = {
    b"\x1f\x8b": "it is gzip-compressed: add .gz to its name",
    b"PK\x03\x04": "it is a zip archive or a spreadsheet: unpack it, or export it as CSV in UTF-8",
    b"PAR1": "it is a parquet file: name it .parquet",
    codecs.BOM_UTF16_LE: "looks like UTF-16: pass --encoding utf-16",
    codecs.BOM_UTF16_BE: "looks like UTF-16: pass --encoding utf-16",
}
SAVE_AS = {  # of kinds that are often tried
    ".txt": "save it as .tsv or .csv, with a line of column names",
    ".xlsx": "save it as CSV in UTF-8",
}
# A line before a sentence of CoNLL-U or MultiCoNER
COMMENT = re.compile(r"# (id\s|newdoc\b|newpar\b|[\w.]+ ?= )")
SAMPLE = 100_000  # characters for a guess
PARQUET_ERRORS = (pyarrow.ArrowException, OSError, ValueError, OverflowError)

Row = tuple[int, dict[str, Any]]  # (line, cells by column)

csv.field_size_limit(2**31 - 1)  # the default, 131072 characters, is too small for long documents


@dataclass
class Problems:
    """Collects the problems of one file, in the order of its rows."""

    path: str
    kind: str
    total: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, number: int, message: str) -> None:
        """`number`: of the row, as in `location`; 0 for the whole file."""
        self.total += 1
        if len(self.messages) < SHOWN:
            where = location(self.path, self.kind, number) if number else self.path
            self.messages.append(f"{where}: {message}")

    def raise_any(self) -> None:
        if self.total > len(self.messages):
            self.messages.append(f"{self.path}: and {self.total - len(self.messages)} more problems")
        if self.total:
            raise InputError(*self.messages)


def location(path: str, kind: str, number: int) -> str:
    """The location of a row for messages: "train.csv:17", "train.json element 3", "train.parquet row 17"."""
    return f"{path}{UNITS.get(kind, ':')}{number}"


# Rows


def file_kind(path: str) -> str:
    """The kind of a file by its name. Raises `InputError` for unknown names, unreadable and empty files."""
    check_readable(path)
    stem, extension = os.path.splitext(path.lower())
    is_gzip = extension == ".gz"
    kind = FILE_KINDS.get(os.path.splitext(stem)[1] if is_gzip else extension)
    if kind is None or (is_gzip and kind == "parquet"):
        advice = f"; {SAVE_AS[extension]}" if extension in SAVE_AS else ""
        raise InputError(
            f"{path}: unknown kind of file{advice}; known extensions: {' '.join(FILE_KINDS)}, and .gz after "
            "the text ones (.csv.gz)"
        )
    if os.path.getsize(path) == 0:
        raise InputError(f"{path}: no rows: the file is empty")
    return kind


def read_rows(
    path: str, encoding: str, required: Sequence[str], names: Sequence[str]
) -> tuple[str, Iterator[Row]]:
    """(kind, iterator of the rows). `names`: all columns to read and check, `required` or not. Raises
    `InputError` with all problems, at the end of the iterator at the latest."""
    kind = file_kind(path)
    if kind == "parquet":
        return kind, _parquet_rows(path, required, names)
    if kind == "conll":
        return kind, _conll_rows(path, encoding, required, names)
    if kind in DELIMITERS:
        return kind, _delimited_rows(path, encoding, kind, required, names)
    return read_json(path, encoding, required)


def _delimited_rows(
    path: str, encoding: str, kind: str, required: Sequence[str], names: Sequence[str]
) -> Iterator[Row]:
    problems = Problems(path, kind)
    reader = csv.reader(text_lines(path, encoding), delimiter=DELIMITERS[kind], strict=True)
    rows = _csv_rows(reader, problems)
    header_line, header = next(((line, row) for line, row in rows if not _is_blank(row)), (0, []))
    problems.raise_any()  # the first line is broken
    if not header:
        raise InputError(f"{path}: no rows: only blank lines")
    mark = next((mark for mark in "\t;|,，；" if mark in header[0]), None)
    if len(header) == 1 and mark and header[0] not in names:
        where, advice = location(path, kind, header_line), "save it with commas as .csv or with tabs as .tsv"
        raise InputError(f"{where}: {mark!r} seems to separate the cells ({listed(header)}): {advice}")
    _check_columns(header, required, names, problems, header_line)
    width, is_empty = len(header), True
    for line, row in rows:
        if _is_blank(row) and width > 1:
            continue
        is_empty = False
        if len(row) != width:
            advice = f"quote cells that contain {DELIMITERS[kind]!r} or line breaks"
            found = f"{len(row)} cells, expected {width} ({listed(header)})"
            problems.add(line, f"{found}; {advice}; the row begins {quoted(row[0])}")
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
    """Yields (first line, cells) of each row; a blank line is a row of one empty cell, unless only others
    follow it. Stops at broken quotes."""
    line, blank = 1, []
    try:
        for row in reader:
            if row:
                yield from ((number, [""]) for number in blank)
                yield line, row
                blank = []
            else:
                blank.append(line)
            line = reader.line_num + 1
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            problems.add(line, 'a quote (") opened in this row is never closed')
        else:
            hint = f"; or is the delimiter not {reader.dialect.delimiter!r}?" if line == 1 else ""
            problems.add(
                line,
                f'text follows a closing quote on line {reader.line_num}; in a quoted cell write " as "", '
                f'and quote a cell that begins with " as a whole{hint}; the rest of the file is not checked',
            )


def _check_columns(
    header: list[str], required: Sequence[str], names: Sequence[str], problems: Problems, line: int
) -> None:
    for name in names:
        if (count := header.count(name)) > 1:
            problems.add(line, f"column {quoted(name)} appears {count} times: rename or remove all but one")
        elif name in required and name not in header:
            problems.add(line, not_found("column", name, header))


def _conll_rows(path: str, encoding: str, required: Sequence[str], names: Sequence[str]) -> Iterator[Row]:
    """Yields a row for each sentence of a file with a word on each line, its tag in the last column, and a
    blank line behind each sentence. The first two of `names` hold its words and its tags, as lists; columns
    between them and COMMENTs are not read. A row's line is that of its first word."""
    problems, first, width, is_empty = Problems(path, "conll"), 0, 0, True
    if missing := [name for name in required if name not in names[:2]]:
        raise InputError(
            f"{path}: has words and tags alone, no column {quoted(missing[0])}; use a jsonl file"
        )
    sentence: list[list[str]] = []
    for number, line in enumerate(chain(text_lines(path, encoding, None), [""]), 1):
        line = line.strip("\r\n")
        if COMMENT.match(line) and not sentence:
            continue
        # A wide space may be a word, but not one of several columns.
        if (line.strip() if width > 1 else line.strip(" \t")) and not line.startswith("-DOCSTART-"):
            # Spaces around a tag would make it another one. A word may be a space of another kind.
            tabs = "\t" in line
            cells = [cell.strip() or cell for cell in line.split("\t")] if tabs else line.split() or [line]
            width, first = width or len(cells), first or number
            if len(cells) != width:
                problems.add(number, f"{len(cells)} column(s), expected {width} as in the first line")
            sentence.append(cells)
        elif sentence:
            is_empty = False
            columns = list(zip(*sentence, strict=False))
            chosen = (columns[0], columns[-1]) if width > 1 else columns
            if not problems.total:
                yield first, dict(zip(names, map(list, chosen), strict=False))
            sentence, first = [], 0
    if width == 1 and names[1:2] and names[1] in required:
        problems.add(0, "has one column; expected a word and, behind a space or tab, its tag")
    if is_empty:
        problems.add(0, "no rows: only blank lines")
    problems.raise_any()


def _parquet_rows(path: str, required: Sequence[str], names: Sequence[str]) -> Iterator[Row]:
    problems, rows, classes = Problems(path, "parquet"), 0, class_columns(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            header = file.schema_arrow.names
            _check_columns(header, required, names, problems, 0)
            problems.raise_any()
            for batch in file.iter_batches(1000, columns=[name for name in names if name in header]):
                for row in batch.to_pylist():
                    named = {x: cell_of(classes[x], row[x]) for x in classes.keys() & row.keys()}
                    rows += 1
                    yield rows, row | named
    except (*PARQUET_ERRORS, IndexError) as error:  # also from broken cells, and of a class without a name
        raise _broken_parquet(path, error, rows) from None
    if not rows:
        raise InputError(f"{path}: no rows")


def _broken_parquet(path: str, error: Exception, rows: int) -> InputError:
    reason = " ".join(str(error).split())[:120]
    return InputError(
        f"{path}: not a valid parquet file ({reason}), after row {rows}: write or copy it again"
    )


def class_columns(path: str) -> dict[str, list[str]]:
    """The names of the classes in the columns of ClassLabels, or lists of them, of a parquet file that
    `datasets` has written; {} for other files."""
    if not path.lower().endswith(".parquet"):
        return {}
    try:
        schema = pyarrow.parquet.read_schema(path)
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = features.get("info", {}).get("features", {})
    except PARQUET_ERRORS as error:
        raise _broken_parquet(path, error, 0) from None
    of_cells = {name: x.get("feature", x) for name, x in features.items() if isinstance(x, dict)}
    classes = {name: of["names"] for name, of in of_cells.items() if of.get("_type") == "ClassLabel"}
    # A program that replaced the numbers by names may have kept the metadata.
    kinds = {field.name: getattr(field.type, "value_type", field.type) for field in schema}
    numbers = {name for name, kind in kinds.items() if pyarrow.types.is_integer(kind)}
    return {name: names for name, names in classes.items() if name in numbers}


def common_classes(parts: Sequence[dict[str, list[str]]]) -> dict[str, list[str]]:
    """The names of classes in the columns that have them in all parts of a table."""
    columns = set.intersection(*map(set, parts))
    return {name: list(dict.fromkeys(chain(*(part[name] for part in parts)))) for name in columns}


def cell_of(names: list[str] | None, cell: Any) -> Any:
    """A cell of a data set, with the numbers of classes (also in lists) replaced by their names. None for -1,
    which marks rows without a class."""
    if names is None:
        return cell
    if isinstance(cell, list):
        return [cell_of(names, number) for number in cell]
    return None if cell is None or cell < 0 else names[cell]


# JSON


def read_json(path: str, encoding: str, required: Sequence[str]) -> tuple[str, Iterator[tuple[int, dict]]]:
    """("json", numbered rows) of an array, which is read as a whole, or ("jsonl", rows with their lines). The
    iterator yields nothing after the first problem. At its end it raises `InputError` with all problems."""
    numbered = enumerate(text_lines(path, encoding, None), 1)
    lines = ((number, line) for number, line in numbered if line.strip())
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}: no rows: only blank lines")
    if first[1].lstrip().startswith("["):
        problems, text = Problems(path, "json"), "".join(text_lines(path, encoding, None))
        return "json", _rows_of(enumerate(_decode(path, text), 1), required, problems)
    problems = Problems(path, "jsonl")
    return "jsonl", _rows_of(_line_values(chain([first], lines), problems), required, problems)


def read_object(path: str | Path) -> dict:
    """The object in a JSON file. Raises `InputError` with file and line, also for duplicate keys and NaN."""
    return object_in(str(path), read_text(path))


def object_in(path: str, text: str) -> dict:
    """The object in a text in JSON. `path`: the name of the text in messages."""
    content = _decode(path, text)
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected an object, found {JSON_TYPES.get(type(content), 'a number')}")
    return content


def _unique(pairs: list[tuple[str, object]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in row if names.count(name) > 1)
        raise ValueError(f"{quoted(duplicate)} appears twice in one object: keep one")
    return row


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON: write null or a number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {quoted(digits)} is too large")
    return number


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite)


def _decode(path: str, text: str) -> object:
    """Decodes a whole file. Raises `InputError`."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"{path}{line}: {_broken_json(error, text)}") from None


def _line_values(lines: Iterable[tuple[int, str]], problems: Problems) -> Iterator[tuple[int, object]]:
    """Yields (line number, value) of every valid line."""
    for number, line_with_end in lines:
        # Else an unclosed string is reported as a line break in a string.
        line = line_with_end.removesuffix("\n")
        try:
            value = DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            is_split = line.strip() == "{"
            advice = "an object over several lines: write each on one line"
            problems.add(number, advice if is_split else _broken_json(error, line))
        else:
            yield number, value


def _broken_json(error: Exception, text: str) -> str:
    if isinstance(error, RecursionError):
        return "broken JSON: nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)  # raised by the functions above, or by int() for too many digits
    rest = text[error.pos : error.pos + 100]
    if not rest.strip() or error.msg.startswith("Unterminated string"):
        return f"unexpected end at column {error.colno}: is the file cut off?"
    return f"broken JSON at column {error.colno}: {error.msg[0].lower()}{error.msg[1:]}, found {quoted(rest)}"


def _rows_of(
    values: Iterable[tuple[int, object]], required: Sequence[str], problems: Problems
) -> Iterator[tuple[int, dict]]:
    """Yields (number, row) of every value, an object. Stops if the first row lacks a required field."""
    rows = 0
    for number, row in values:
        if type(row) is not dict:
            type_name = JSON_TYPES.get(type(row), "a number")
            problems.add(number, f'expected an object, {{"field": value, ...}}, found {type_name}')
            continue
        rows += 1
        for name in required:
            if name not in row:
                missing = f"field {quoted(name)} is missing: every row needs it"
                problems.add(number, not_found("field", name, list(row)) if rows == 1 else missing)
        if rows == 1:
            problems.raise_any()
        if not problems.total:
            yield number, row
    if not rows and not problems.total:
        problems.add(0, "no rows: the array is empty")
    problems.raise_any()


# Text


def matching(pattern: str) -> list[str]:
    """The files that match a pattern, sorted. A plain name or an existing file matches itself."""
    if os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    return sorted(glob.glob(pattern, recursive=True))


def check_readable(path: str) -> None:
    """Raises `InputError` unless `path` is a readable regular file or a link to one."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            open(path, "rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: {_missing(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InputError(f"{path}: cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"{path}: is a folder, expected a file")
    if not stat.S_ISREG(mode):  # files are read several times, and opening a pipe without a writer hangs
        raise InputError(
            f"{path}: is a pipe or a device, expected a regular file: write its content to a file first"
        )


def text_lines(path: str, encoding: str, newline: str | None = "") -> Iterator[str]:
    """Yields the physical lines without the byte order mark. Line ends are kept, or \\n with `newline=None`.

    Raises `InputError` for an unknown encoding, an unreadable file, invalid bytes (with their position and a
    guess of the encoding), and a truncated or corrupt gzip stream.
    """
    try:
        with _open_bytes(path) as raw, io.TextIOWrapper(raw, encoding=encoding, newline=newline) as text:
            yield text.readline().removeprefix("\ufeff")
            yield from text
    except UnicodeError:
        raise InputError(_explain_encoding(path, encoding)) from None
    except (LookupError, ValueError):
        raise InputError(
            f"--encoding {encoding}: not a text encoding; known ones are utf-8, gb18030, utf-16, ..."
        ) from None
    except (EOFError, zlib.error, OSError) as error:
        raise InputError(f"{path}: {_unreadable(error)}") from None


def _reason(error: Exception) -> str:
    """The message of the operating system, without error number and path."""
    return (getattr(error, "strerror", None) or str(error)).lower()


def _missing(path: str) -> str:
    if os.path.islink(path):
        return f"is a link to {os.readlink(path)!r}, which does not exist: restore that file or name another"
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return f"no such file: there is no folder {folder!r}"
    near = nearest(name, os.listdir(folder or "."))
    return f"no such file; did you mean {os.path.join(folder, near)!r}?" if near else "no such file"


def _open_bytes(path: str) -> BinaryIO:
    return gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb")


def _unreadable(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "truncated: the gzip stream ends before its end mark; copy or compress the file again"
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return f"not a whole gzip file ({error}): copy or compress it again, or remove .gz from its name"
    return f"cannot be read: {_reason(error)}"


def _explain_encoding(path: str, encoding: str) -> str:
    try:
        with _open_bytes(path) as raw:
            data = raw.read()
        # As the file is decoded: unlike that, bytes.decode("utf-16") accepts a missing byte order mark.
        codecs.getincrementaldecoder(encoding)().decode(data, final=True)
    except (EOFError, zlib.error, OSError) as error:
        return f"{path}: {_unreadable(error)}"
    except UnicodeError as error:
        start = getattr(error, "start", 0)
    else:
        return f"{path}: changed while it was read: start again when it is complete"
    before = data[:start].decode(encoding, "ignore")
    line = 1 + len(re.findall("\r\n|\r|\n", before))
    where = f"byte {start} (0x{data[start]:02x}), line {line}"  # bytes count from 0, as in hex viewers
    return f"{path}: not {encoding.upper()} at {where}; {_advice(data, before)}"


def _advice(data: bytes, before: str) -> str:
    """Guesses the encoding and returns what to do. `before`: the text before the first invalid byte."""
    for magic, advice in OTHER_FORMATS.items():
        if data.startswith(magic):
            return advice
    if _decodes(data, "utf-8"):
        return "it is valid UTF-8: leave --encoding out"
    if _decodes(data, "gb18030"):
        hanzi = "".join(character for character in data.decode("gb18030")[:SAMPLE] if character > "\x7f")
        if len(hanzi.encode("gb2312", "ignore")) > 0.8 * 2 * len(hanzi):  # mostly common characters
            return "looks like GB18030: pass --encoding gb18030 and look at the first rows"
    if not before.isascii():
        return "the text before it is valid, so the file is cut off or damaged there: copy it again"
    return (
        "find out its encoding (often cp1252 in Western Europe), then pass --encoding NAME or convert "
        "the file to UTF-8"
    )


def _decodes(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeError:
        return False
    return True
