"""Files of rows, read strictly: csv, tsv, json, jsonl (and .gz of these), parquet. Level 1, over textfile.py.

No types are inferred: "NA", "007" and "1e5" in a csv stay text, json values keep the type they were written with. What
is wrong with a file is collected in one pass and reported together, each problem with its physical line.
"""

import csv
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from finetune.failure import InputError
from finetune.textfile import check_readable, read_text, text_lines

KINDS = {".csv": "csv", ".tsv": "tsv", ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
DELIMITERS = {"csv": ",", "tsv": "\t"}
SHOWN_PROBLEMS = 20
CELL_LIMIT = 2**31 - 1  # csv's own limit, 131072 characters, is below one long document
BLOCK = 10_000  # csv rows held as rows before they are turned into columns
MAX_OPTIONAL_FIELDS = 5_000
JSON_SPACE = re.compile(r"[ \t\n\r]*")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


@dataclass(frozen=True)
class Table:
    """Rows as columns of equal length, and where each row stands in its file."""

    path: str
    kind: str  # "csv", "tsv", "json" (one array), "jsonl" or "parquet": what the file holds, whatever its name says
    columns: dict[str, list]
    lines: list[int]  # row i starts on this line of the file, from 1; in parquet, the row number from 1

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, i: int) -> str:
        """Row i in words for a message: "train.csv:17", "train.json:17 (element 3)", "train.parquet row 17"."""
        if self.kind == "parquet":
            return f"{self.path} row {self.lines[i]}"
        element = f" (element {i + 1})" if self.kind == "json" else ""  # a whole array may stand on one line
        return f"{self.path}:{self.lines[i]}{element}"


def read_table(path: str, encoding: str = "utf-8", required: Sequence[str] = ()) -> Table:
    """The rows of one file, by its extension: .csv .tsv .json .jsonl .ndjson .parquet, .gz of the text ones.

    Cells of csv and tsv are str. Blank lines are skipped. A json field that some rows lack is None there, unless it is
    in `required`. Raises InputError with the file's problems in line order, the first 20 and the count of the rest.
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
    if kind == "parquet":
        return _read_parquet(path, required)
    if kind in DELIMITERS:
        return _read_delimited(path, encoding, kind, required)
    return _read_json(path, encoding, required)


def file_fingerprint(path: str) -> str:
    """sha256 (hex) of the file's bytes as they lie on disk, .gz not unpacked. Raises InputError if unreadable."""
    path = os.fspath(path)
    check_readable(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass
class _Problems:
    """What is wrong with one file, in line order at the end; line 0 stands for the whole file."""

    path: str
    total: int = 0
    kept: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, message: str) -> None:
        self.total += 1
        if len(self.kept) < SHOWN_PROBLEMS:
            self.kept.append((line, message))

    def add_rows(self, lines: Sequence[int], messages: Iterable[str]) -> None:
        """Problems found after the others, of which any may come first in the file."""
        self.total += len(lines)
        self.kept.extend(islice(zip(lines, messages, strict=True), SHOWN_PROBLEMS))

    def raise_any(self) -> None:
        if not self.total:
            return
        shown = sorted(self.kept, key=lambda problem: problem[0])[:SHOWN_PROBLEMS]
        messages = [f"{self.path}:{line}: {message}" if line else f"{self.path}: {message}" for line, message in shown]
        if self.total > len(shown):
            messages.append(f"{self.path}: and {self.total - len(shown)} more problems")
        raise InputError(*messages)


def _read_delimited(path: str, encoding: str, kind: str, required: Sequence[str]) -> Table:
    problems = _Problems(path)
    old_limit = csv.field_size_limit(CELL_LIMIT)  # a setting of the whole process, put back below
    try:
        reader = csv.reader(text_lines(path, encoding), delimiter=DELIMITERS[kind], strict=True)
        rows = _csv_rows(reader, problems)
        header_line, header = next(((line, row) for line, row in rows if not _is_blank(row)), (0, []))
        problems.raise_any()  # a broken first line: nothing after it can be the column names
        _check_header(header, header_line, kind, required, problems)
        table = Table(path, kind, {name: [] for name in header}, [])
        whole_rows = _rows_of_width(rows, header, kind, table.lines, problems)
        while block := list(islice(whole_rows, BLOCK)):
            # With a duplicate column there are fewer lists than cells; that table is never returned.
            for values, cells in zip(table.columns.values(), zip(*block, strict=True), strict=False):
                values.extend(cells)
    finally:
        csv.field_size_limit(old_limit)
    if not table.lines and not problems.total:
        problems.add(0, "no rows: only the line of column names" if header else "no rows: only blank lines")
    problems.raise_any()
    return table


def _is_blank(row: list[str]) -> bool:
    return len(row) == 1 and not row[0].strip()


def _csv_rows(reader, problems: _Problems) -> Iterator[tuple[int, list[str]]]:
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
    rows: Iterable[tuple[int, list[str]]], header: list[str], kind: str, lines: list[int], problems: _Problems
) -> Iterator[list[str]]:
    width = len(header)
    for line, row in rows:
        if len(row) == width:
            lines.append(line)
            yield row
        elif not _is_blank(row):
            comma = "commas" if kind == "csv" else "tabs"
            problems.add(
                line,
                f"{_count(len(row), 'cell')}, expected {width} ({_listed(header)}); quote cells that contain {comma} "
                f"or line breaks; the row begins {_short(row[0])}",
            )


def _check_header(header: list[str], line: int, kind: str, required: Sequence[str], problems: _Problems) -> None:
    if not header:
        return
    places: dict[str, list[str]] = {}
    for number, name in enumerate(header, start=1):
        places.setdefault(name, []).append(str(number))
    for name, numbers in places.items():
        if len(numbers) > 1:
            column = f"column {_short(name)} appears {len(numbers)} times" if name else "several columns have no name"
            problems.add(line, f"{column} (columns {_listed(numbers)}): rename or remove all but one")
    missing = [name for name in required if name not in places]
    if missing and len(header) == 1 and (delimiter := _other_delimiter(header[0], missing)):
        right = {"\t": ".tsv", ",": ".csv"}.get(delimiter)
        advice = f"name it {right}" if right else "save it with commas"
        problems.add(
            line,
            f"column {_short(missing[0])} not found; found: {_listed(header)}; {delimiter!r} seems to separate the "
            f"cells, which a .{kind} file is not split at: {advice}",
        )
        problems.raise_any()  # every row would count as ragged
    for name in missing:
        problems.add(line, _not_found("column", name, header))
    if len(missing) == len(required) > 0 and not any(_nearest(name, header) for name in missing):
        problems.add(line, "the first line must hold the column names: is it missing?")


def _other_delimiter(header: str, missing: Sequence[str]) -> str | None:
    return next((mark for mark in "\t;|," if set(missing) & {name.strip(' "') for name in header.split(mark)}), None)


def _read_json(path: str, encoding: str, required: Sequence[str]) -> Table:
    lines = ((number, line) for number, line in enumerate(text_lines(path, encoding, None), 1) if line.strip())
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}: no rows: only blank lines")
    problems = _Problems(path)
    first_line, opening = first[0], first[1].strip()[:2]
    if opening.startswith("["):
        del first  # it may be the whole file
        lines.close()
        table = Table(path, "json", {}, [])
        values = _array_values(read_text(path, encoding), problems)
    else:
        table = Table(path, "jsonl", {}, [])
        values = _line_values(chain([first], lines), problems)
    _fill_columns(table, values, required, problems)
    if opening == "{" and problems.total:
        raise InputError(
            f"{path}:{first_line}: an object over several lines; expected an array of objects, [{{...}}, {{...}}], or "
            "one object per line"
        )
    if not table.lines and not problems.total:
        problems.add(0, "no rows: the array is empty")
    problems.raise_any()
    return table


def _json_decoder(complaints: list[str]) -> json.JSONDecoder:
    """Notes in `complaints` what is JSON's grammar but no data, and goes on: the text after it can still be checked."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in row if names.count(name) > 1)
            complaints.append(f"{_short(twice)} appears twice in one object: keep one")
        return row

    def constant(name: str) -> None:
        complaints.append(f"{name} is not JSON: write null or a number")

    def finite(digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            complaints.append(f"the number {_short(digits)} is too large")
        return number

    return json.JSONDecoder(object_pairs_hook=unique, parse_constant=constant, parse_float=finite)


def _line_values(lines: Iterable[tuple[int, str]], problems: _Problems) -> Iterator[tuple[int, object]]:
    complaints: list[str] = []
    decoder = _json_decoder(complaints)
    for number, ended_line in lines:
        line = ended_line.removesuffix("\n")  # an unclosed string would seem to hold a line break
        complaints.clear()
        try:
            value = decoder.decode(line)
        except (ValueError, RecursionError) as error:
            problems.add(number, _broken_json(error, line))
            continue
        if "\\u" in line and SURROGATE.search(line):
            complaints += _lone_surrogates(value)
        for complaint in complaints:
            problems.add(number, complaint)
        yield number, value


def _array_values(text: str, problems: _Problems) -> Iterator[tuple[int, object]]:
    """Element by element, so that each has its line. A syntax error ends the reading: the next start is unknown."""
    complaints: list[str] = []
    decoder = _json_decoder(complaints)
    may_have_surrogates = SURROGATE.search(text) is not None
    position = JSON_SPACE.match(text, text.index("[") + 1).end()
    line, counted = 1, 0
    if text[position : position + 1] == "]":
        return
    while True:
        line, counted = line + text.count("\n", counted, position), position
        complaints.clear()
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            problems.add(getattr(error, "lineno", line), _broken_json(error, text))
            return
        if may_have_surrogates:
            complaints += _lone_surrogates(value)
        for complaint in complaints:
            problems.add(line, complaint)
        yield line, value
        end = JSON_SPACE.match(text, end).end()
        mark, position = text[end : end + 1], JSON_SPACE.match(text, end + 1).end()
        if mark == "]" and position == len(text):
            return
        if mark != ",":
            wrong = position if mark == "]" else end
            found = _short(text[wrong : wrong + 40]) if text[wrong:] else "the end of the file"
            expected = "nothing after the array's ']'" if mark == "]" else "',' or ']' after an element"
            problems.add(1 + text.count("\n", 0, wrong), f"broken JSON: expected {expected}, found {found}")
            return


def _broken_json(error: Exception, text: str) -> str:
    if isinstance(error, RecursionError):
        return "broken JSON: nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return f"broken JSON: {error}"  # an integer of more digits than Python converts
    rest = text[error.pos : error.pos + 1000]
    where = f"broken JSON at column {error.colno}"
    if error.msg.startswith("Unterminated string"):
        return f"unexpected end of line: the string opened at column {error.colno} is not closed; is the file cut off?"
    if not rest.strip():
        return f"unexpected end of line at column {error.colno}: is the file cut off?"
    if rest[0] in "]}" and text[max(0, error.pos - 1000) : error.pos].rstrip().endswith(","):
        return f"{where}: {rest[0]!r} after a comma; remove that comma"
    if error.msg.startswith("Extra data"):
        return f"{where}: more than one value on the line, found {_short(rest)}"
    return f"{where}: {error.msg[0].lower()}{error.msg[1:].removesuffix(' at')}, found {_short(rest)}"


def _lone_surrogates(value: object) -> Iterator[str]:
    for name, part in value.items() if isinstance(value, dict) else [("", value)]:
        try:
            json.dumps([name, part], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(error.object[error.start]):04x}"
            yield f"field {name!a} holds {code}, half of a character (a lone surrogate): remove or complete it"
        except RecursionError:
            yield "broken JSON: nested too deeply"


def _fill_columns(
    table: Table,
    values: Iterable[tuple[int, object]],
    required: Sequence[str],
    problems: _Problems,
) -> None:
    """Appends the objects to the table's columns; None where a row lacks a field that another has."""
    columns, lines = table.columns, table.lines
    lacking: dict[str, list[int]] = {name: [] for name in required}
    for line, row in values:
        if type(row) is not dict:
            found = JSON_TYPES.get(type(row), "a number")
            problems.add(line, f'expected an object, {{"field": value, ...}}, found {found}')
            continue
        if row.keys() != columns.keys():
            for name in row:
                if name not in columns:
                    columns[name] = [None] * len(lines)
            if len(columns) > max(MAX_OPTIONAL_FIELDS, len(row)):  # memory would grow with rows times fields
                problems.add(line, f"{len(columns)} different fields so far, in few rows each: use the same in every row")
                return
            for name in columns.keys() - row.keys():
                columns[name].append(None)
        for name, value in row.items():
            columns[name].append(value)
        lines.append(line)
        for name in required:
            if name not in row:
                lacking[name].append(line)
    for name, places in lacking.items():
        if places and len(places) == len(lines):
            problems.add_rows([0], [_not_found("field", name, list(columns))])
        else:
            problems.add_rows(places, [f"field {_short(name)} is missing: every row needs it"] * len(places))


def _read_parquet(path: str, required: Sequence[str]) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            content = file.read()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: not a whole parquet file ({_first_line(error)}): write or copy it again") from None
    problems = _Problems(path)
    names = content.column_names
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            problems.add(0, f"column {_short(name)} appears {names.count(name)} times: rename or remove all but one")
    for name in required:
        if name not in names:
            problems.add(0, _not_found("column", name, names))
    if not content.num_rows and not problems.total:
        problems.add(0, "no rows")
    problems.raise_any()
    columns = {name: _parquet_cells(path, name, content.column(name)) for name in names}
    return Table(path, "parquet", columns, list(range(1, content.num_rows + 1)))


def _parquet_cells(path: str, name: str, column) -> list:
    """Cells as Python values. Raises InputError with the row of the first that is none, such as broken UTF-8."""
    try:
        return column.to_pylist()
    except Exception:  # pyarrow, datetime, decimal and codecs each have their own
        for row, cell in enumerate(column, start=1):
            try:
                cell.as_py()
            except Exception as error:
                raise InputError(f"{path} row {row}: column {_short(name)}: {_first_line(error)}") from None
        raise InputError(f"{path}: column {_short(name)} cannot be read: write it as text") from None


def _not_found(what: str, name: str, found: Sequence[str]) -> str:
    nearest = _nearest(name, found)
    hint = f"did you mean {_short(nearest)}? Rename it" if nearest else "rename one of them"
    found_names = _listed(found) or "none"
    return f"{what} {_short(name)} not found; found: {found_names}; {hint} or pass its name with the --..._column argument"


def _nearest(name: str, found: Sequence[str]) -> str | None:
    folded = {other.strip().casefold(): other for other in found}
    close = difflib.get_close_matches(name, found, n=1)
    return folded.get(name.strip().casefold()) or (close[0] if close else None)


def _listed(names: Sequence[str]) -> str:
    """Names as they are where that is clear, in quotes where it is not; the first ten of many."""
    plain = [name if name.isprintable() and name == name.strip() and len(name) <= 40 else "" for name in names[:10]]
    shown = [clear or _short(name) for clear, name in zip(plain, names, strict=False)]
    return ", ".join(shown) + (f", ... {len(names)} in all" if len(names) > 10 else "")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:120] if lines else type(error).__name__
