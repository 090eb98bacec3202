"""Rows of a json array or of one object per line, with the line of each."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from finetune.errors import InputError
from finetune.reading.problems import Problems, not_found, short
from finetune.reading.text_files import text_lines

CONTEXT = 1_000  # characters around an error that its message looks at
JSON_SPACE = re.compile(r"[ \t\n\r]*")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def read_json(path: str, encoding: str, required: Sequence[str]) -> tuple[str, Iterator[tuple[int, dict]]]:
    """("json" for an array, which is read as a whole; "jsonl" for an object per line; each row with its line).

    Raises InputError with all that is wrong, behind the last row; there are no rows behind the first problem.
    """
    lines = ((number, line) for number, line in enumerate(text_lines(path, encoding, None), 1) if line.strip())
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}: no rows: only blank lines")
    problems, (number, line) = Problems(path), first
    if line.lstrip().startswith("["):
        text = "".join(text_lines(path, encoding, None))
        return "json", _rows_of(_array_values(text, problems), required, problems)
    split_at = number if line.strip() == "{" else None
    return "jsonl", _rows_of(_line_values(chain([first], lines), problems), required, problems, split_at)


def read_object(path: str | Path) -> dict:
    """The one object of a json file, such as a configuration. A key that stands twice and numbers that JSON does not have are
    errors. Raises InputError naming file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    complaints = _Complaints()
    try:
        content = complaints.decoder().decode(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise InputError(f"{path}:{line}: not valid JSON: {_broken_json(error, text)}") from None
    if complaints:
        raise InputError(*(f"{path}: {complaint}" for complaint in complaints))
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected an object, found {JSON_TYPES.get(type(content), 'a number')}")
    return content


class _Complaints(list[str]):
    """What is JSON's grammar but no data. Decoding goes on: the text after it can still be checked."""

    def decoder(self) -> json.JSONDecoder:
        return json.JSONDecoder(object_pairs_hook=self._unique, parse_constant=self._constant, parse_float=self._finite)

    def _unique(self, pairs: list[tuple[str, object]]) -> dict:
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in row if names.count(name) > 1)
            self.append(f"{short(twice)} appears twice in one object: keep one")
        return row

    def _constant(self, name: str) -> None:
        self.append(f"{name} is not JSON: write null or a number")

    def _finite(self, digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            self.append(f"the number {short(digits)} is too large")
        return number


def _line_values(lines: Iterable[tuple[int, str]], problems: Problems) -> Iterator[tuple[int, object]]:
    """(line, value) of every line that holds one."""
    complaints = _Complaints()
    decoder = complaints.decoder()
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
        yield number, value


def _decode(decoder: json.JSONDecoder, line: str) -> object:
    """`decoder.decode`, without its overhead where an object fills the line."""
    if line.startswith("{") and line.endswith("}"):
        with suppress(StopIteration):  # how it says that a value is missing
            value, end = decoder.scan_once(line, 0)
            if end == len(line):
                return value
    return decoder.decode(line)


def _array_values(text: str, problems: Problems) -> Iterator[tuple[int, object]]:
    """(line, value) of every element of an array. A syntax error ends the reading: the next start is unknown."""
    complaints = _Complaints()
    decoder = complaints.decoder()
    start = text.index("[") + 1
    at = JSON_SPACE.match(text, start).end()
    line = 1 + text.count("\n", 0, at)
    if text.startswith("]", at):
        return
    while True:
        complaints.clear()
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            problems.add(getattr(error, "lineno", line), _broken_json(error, text))
            return
        if SURROGATE.search(text, at, end):
            complaints += _lone_surrogates(value)
        for complaint in complaints:
            problems.add(line, complaint)
        yield line, value
        behind = JSON_SPACE.match(text, end).end()
        mark = text[behind : behind + 1]
        after = JSON_SPACE.match(text, behind + 1).end() if mark in (",", "]") else behind
        line += text.count("\n", at, after)
        at = after
        if mark == ",":
            continue
        if mark != "]" or at < len(text):
            expected = "nothing after the array's ']'" if mark == "]" else "',' or ']' after an element"
            found = short(text[at : at + 40]) if at < len(text) else "the end of the file"
            problems.add(line, f"broken JSON: expected {expected}, found {found}")
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


def _rows_of(
    values: Iterable[tuple[int, object]], required: Sequence[str], problems: Problems, split_at: int | None = None
) -> Iterator[tuple[int, dict]]:
    """(line, row) of every value, which must be an object. `split_at`: a line that holds nothing but the opening of one."""
    names: dict[str, None] = {}  # of all the rows
    lacking: dict[str, list[int]] = {name: [] for name in required}
    rows = 0
    for line, row in values:
        if type(row) is not dict:
            found = JSON_TYPES.get(type(row), "a number")
            problems.add(line, f'expected an object, {{"field": value, ...}}, found {found}')
            continue
        rows += 1
        for name in required:
            if name not in row:
                lacking[name].append(line)
        if problems.total or any(lacking.values()):
            names.update(dict.fromkeys(row))
        else:
            yield line, row
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
