"""Rows of a json array or of one object per line, with the line of each. Level 2, over textfile.py."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from finetune.errors import InputError
from finetune.reading.blocks import BLOCK_CHARACTERS, BLOCK_ROWS, Block
from finetune.reading.problems import Problems, not_found, short
from finetune.reading.text_files import text_lines, text_pieces

CONTEXT = 1_000  # characters around an error that its message looks at
MAX_OPTIONAL_FIELDS = 5_000
JSON_SPACE = re.compile(r"[ \t\n\r]*")
ANY_SPACE = re.compile(r"\s*")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def read_json(path: str, encoding: str, required: Sequence[str]) -> tuple[str, Iterator[Block]]:
    """("json" for an array, "jsonl" for an object per line; the rows).

    A field that some rows lack is None there, unless it is in `required`. Raises InputError with all that is wrong, behind the
    last row; there are no rows behind the first problem.
    """
    pieces = text_pieces(path, encoding)
    window = _Window(pieces)
    window.skip(ANY_SPACE)
    if window.at == len(window.text):
        raise InputError(f"{path}: no rows: only blank lines")
    problems = Problems(path)
    if window.text[window.at] == "[":
        return "json", _blocks_of(_array_values(window, problems), required, problems)
    pieces.close()
    lines = ((number, line) for number, line in enumerate(text_lines(path, encoding, None), 1) if line.strip())
    first = next(lines)
    first_line, opening = first[0], first[1].strip()[:2]
    for mark, kind in ((",", "csv"), ("\t", "tsv")):
        if opening[0] != "{" and set(required) & {name.strip(' "') for name in first[1].strip().split(mark)}:
            raise InputError(f"{path}:{first_line}: it holds column names, not JSON: name it .{kind}")
    values = _line_values(chain([first], lines), problems)
    return "jsonl", _blocks_of(values, required, problems, split_at=first_line if opening == "{" else None)


def read_object(path: str | Path) -> dict:
    """The one object of a json file, such as a configuration. A key that stands twice and numbers that JSON does not have are
    errors. Raises InputError naming file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    complaints: list[str] = []
    try:
        content = _json_decoder(complaints).decode(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise InputError(f"{path}:{line}: not valid JSON: {_broken_json(error, text)}") from None
    if complaints:
        raise InputError(*(f"{path}: {complaint}" for complaint in complaints))
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected an object, found {JSON_TYPES.get(type(content), 'a number')}")
    return content


def _json_decoder(complaints: list[str]) -> json.JSONDecoder:
    """Notes in `complaints` what is JSON's grammar but no data, and goes on: the text after it can still be checked."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in row if names.count(name) > 1)
            complaints.append(f"{short(twice)} appears twice in one object: keep one")
        return row

    def constant(name: str) -> None:
        complaints.append(f"{name} is not JSON: write null or a number")

    def finite(digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            complaints.append(f"the number {short(digits)} is too large")
        return number

    return json.JSONDecoder(object_pairs_hook=unique, parse_constant=constant, parse_float=finite)


def _line_values(lines: Iterable[tuple[int, str]], problems: Problems) -> Iterator[tuple[int, object, int]]:
    """(line, value, characters) of every line that holds one."""
    complaints: list[str] = []
    decoder = _json_decoder(complaints)
    for number, ended_line in lines:
        line = ended_line.removesuffix("\n")  # an unclosed string would seem to hold a line break
        complaints.clear()
        try:
            value = _decode(decoder, line)
        except (ValueError, RecursionError) as error:
            problems.add(number, _broken_json(error, line))
            continue
        if "\\u" in line and SURROGATE.search(line):
            complaints += _lone_surrogates(value)
        for complaint in complaints:
            problems.add(number, complaint)
        yield number, value, len(line)


def _decode(decoder: json.JSONDecoder, line: str) -> object:
    """`decoder.decode`, without its overhead where an object fills the line."""
    if line.startswith("{") and line.endswith("}"):
        with suppress(StopIteration):  # how it says that a value is missing
            value, end = decoder.scan_once(line, 0)
            if end == len(line):
                return value
    return decoder.decode(line)


class _Window:
    """A part of a text that comes in pieces. `at`: where its reader is in `text`; what lies before may be let go of."""

    def __init__(self, pieces: Iterator[str]):
        self._pieces = pieces
        self._before = 0  # characters of the first line of `text` that were let go of
        self.text, self.at, self.line = "", 0, 1  # the line of `at`

    def more(self) -> bool:
        """Reads on, as much again as there is behind `at`, so that reading a long value anew each time is cheap. False at the
        end of the text."""
        new, wanted = [], max(1, len(self.text) - self.at)
        while wanted > 0 and (piece := next(self._pieces, None)) is not None:
            new.append(piece)
            wanted -= len(piece)
        if not new:
            return False
        start = max(0, self.at - CONTEXT)
        gone = self.text[:start]
        self._before = start - 1 - gone.rfind("\n") + (0 if "\n" in gone else self._before)
        self.text, self.at = "".join([self.text[start:], *new]), self.at - start
        return True

    def advance(self, place: int) -> None:
        self.line += self.text.count("\n", self.at, place)
        self.at = place

    def skip(self, space: re.Pattern = JSON_SPACE) -> None:
        """Moves to the next character that is no white space, or to the end."""
        self.advance(space.match(self.text, self.at).end())
        while self.at == len(self.text) and self.more():
            self.advance(space.match(self.text, self.at).end())

    def explain(self, error: Exception) -> tuple[int, str]:
        """(line, message) of an error in decoding `text`."""
        if not isinstance(error, json.JSONDecodeError):
            return self.line, _broken_json(error, self.text)
        if error.lineno == 1:
            error.colno += self._before
        return self.line + self.text.count("\n", self.at, error.pos), _broken_json(error, self.text)


def _array_values(window: _Window, problems: Problems) -> Iterator[tuple[int, object, int]]:
    """(line, value, characters) of every element of the array that the window is at. A syntax error ends the reading: the next
    start is unknown."""
    complaints: list[str] = []
    decoder = _json_decoder(complaints)
    window.advance(window.at + 1)
    window.skip()
    if window.text.startswith("]", window.at):
        return
    while True:
        complaints.clear()
        try:
            value, end = decoder.raw_decode(window.text, window.at)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError) and window.more():  # it may go on there
                continue
            problems.add(*window.explain(error))
            return
        behind = JSON_SPACE.match(window.text, end).end()
        mark = window.text[behind : behind + 1]
        if (not mark or mark not in ",]") and window.more():  # 1 may be the beginning of 1.5
            continue
        if SURROGATE.search(window.text, window.at, end):
            complaints += _lone_surrogates(value)
        for complaint in complaints:
            problems.add(window.line, complaint)
        yield window.line, value, end - window.at
        window.advance(behind)
        if mark == ",":
            window.advance(behind + 1)
            window.skip()
            continue
        expected = "',' or ']' after an element"
        if mark == "]":
            window.advance(behind + 1)
            window.skip()
            expected = "nothing after the array's ']'"
            if window.at == len(window.text):
                return
        while len(window.text) - window.at < 40 and window.more():
            pass
        rest = window.text[window.at :]
        found = short(rest[:40]) if rest else "the end of the file"
        problems.add(window.line, f"broken JSON: expected {expected}, found {found}")
        return


def _broken_json(error: Exception, text: str) -> str:
    if isinstance(error, RecursionError):
        return "broken JSON: nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return f"broken JSON: {error}"  # an integer of more digits than Python converts
    rest = text[error.pos : error.pos + CONTEXT]
    where = f"broken JSON at column {error.colno}"
    if error.msg.startswith("Unterminated string"):
        return f"unexpected end of line: the string opened at column {error.colno} is not closed; is the file cut off?"
    if not rest.strip():
        return f"unexpected end of line at column {error.colno}: is the file cut off?"
    if rest[0] in "]}" and text[max(0, error.pos - CONTEXT) : error.pos].rstrip().endswith(","):
        return f"{where}: {rest[0]!r} after a comma; remove that comma"
    if error.msg.startswith("Extra data"):
        return f"{where}: more than one value on the line, found {short(rest)}"
    return f"{where}: {error.msg[0].lower()}{error.msg[1:].removesuffix(' at')}, found {short(rest)}"


def _lone_surrogates(value: object) -> Iterator[str]:
    for name, part in value.items() if isinstance(value, dict) else [("", value)]:
        try:
            json.dumps([name, part], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(error.object[error.start]):04x}"
            yield f"field {name!a} holds {code}, half of a character (a lone surrogate): remove or complete it"
        except RecursionError:
            yield "broken JSON: nested too deeply"


def _blocks_of(
    values: Iterable[tuple[int, object, int]], required: Sequence[str], problems: Problems, split_at: int | None = None
) -> Iterator[Block]:
    """The objects' fields as columns; None where a row lacks a field that another of its block has.

    `split_at`: a line that holds nothing but the opening of an object.
    """
    names: dict[str, None] = {}  # of all the rows so far
    columns: dict[str, list] = {}
    lines: list[int] = []
    lacking: dict[str, list[int]] = {name: [] for name in required}
    rows = characters = 0
    for line, row, size in values:
        if type(row) is not dict:
            found = JSON_TYPES.get(type(row), "a number")
            problems.add(line, f'expected an object, {{"field": value, ...}}, found {found}')
            continue
        if row.keys() != columns.keys():
            for name in row:
                if name not in columns:
                    columns[name] = [None] * len(lines)
                    names[name] = None
            if len(names) > max(MAX_OPTIONAL_FIELDS, len(row)):  # memory would grow with rows times fields
                problems.add(line, f"{len(names)} different fields so far, in few rows each: use the same in every row")
                lacking.clear()
                break
            for name in columns.keys() - row.keys():
                columns[name].append(None)
        for name, value in row.items():
            columns[name].append(value)
        lines.append(line)
        rows += 1
        characters += size
        for name in required:
            if name not in row:
                lacking[name].append(line)
        if len(lines) == BLOCK_ROWS or characters >= BLOCK_CHARACTERS:
            if not problems.total:
                yield Block(lines, columns)
            columns, lines, characters = {}, [], 0
    for name, places in lacking.items():
        if places and len(places) == rows:
            problems.add_rows([0], [not_found("field", name, list(names))])
        else:
            problems.add_rows(places, [f"field {short(name)} is missing: every row needs it"] * len(places))
    if split_at is not None and problems.total:
        raise InputError(
            f"{problems.path}:{split_at}: an object over several lines; expected an array of objects, [{{...}}, {{...}}], or "
            "one object per line"
        )
    if not rows and not problems.total:
        problems.add(0, "no rows: the array is empty")
    problems.raise_any()
    if lines:
        yield Block(lines, columns)
