"""Rows of a json array or of one object per line."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from finetune.errors import InputError
from finetune.reading.problems import Problems, not_found, short
from finetune.reading.text_files import read_text, text_lines

JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def read_json(path: str, encoding: str, required: Sequence[str]) -> tuple[str, Iterator[tuple[int, dict]]]:
    """("json" for an array, which is read as a whole, each row with its number; "jsonl" for an object per line, each row with
    its line).

    Raises InputError with all that is wrong, behind the last row; there are no rows behind the first problem.
    """
    lines = ((number, line) for number, line in enumerate(text_lines(path, encoding, None), 1) if line.strip())
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}: no rows: only blank lines")
    if first[1].lstrip().startswith("["):
        problems, text = Problems(path, "json"), "".join(text_lines(path, encoding, None))
        return "json", _rows_of(enumerate(_decode(path, text), 1), required, problems)
    problems = Problems(path, "jsonl")
    return "jsonl", _rows_of(_line_values(chain([first], lines), problems), required, problems)


def read_object(path: str | Path) -> dict:
    """The one object of a json file, such as a configuration. A key that stands twice and numbers that JSON does not have are
    errors. Raises InputError naming file and line."""
    content = _decode(str(path), read_text(path))
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected an object, found {JSON_TYPES.get(type(content), 'a number')}")
    return content


def _unique(pairs: list[tuple[str, object]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in row if names.count(name) > 1)
        raise ValueError(f"{short(twice)} appears twice in one object: keep one")
    return row


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON: write null or a number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {short(digits)} is too large")
    return number


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite)


def _decode(path: str, text: str) -> object:
    """The value of a whole file. Raises InputError."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"{path}{line}: {_broken_json(error, text)}") from None


def _line_values(lines: Iterable[tuple[int, str]], problems: Problems) -> Iterator[tuple[int, object]]:
    """(line, value) of every line that holds one."""
    for number, ended_line in lines:
        line = ended_line.removesuffix("\n")  # an unclosed string would seem to hold a line break
        try:
            value = DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            whole = line.strip() != "{"
            problems.add(number, _broken_json(error, line) if whole else "an object over several lines: write each on one line")
        else:
            yield number, value


def _broken_json(error: Exception, text: str) -> str:
    if isinstance(error, RecursionError):
        return "broken JSON: nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)  # of the functions above, or an integer of more digits than Python converts
    rest = text[error.pos : error.pos + 100]
    if not rest.strip() or error.msg.startswith("Unterminated string"):
        return f"unexpected end at column {error.colno}: is the file cut off?"
    return f"broken JSON at column {error.colno}: {error.msg[0].lower()}{error.msg[1:]}, found {short(rest)}"


def _rows_of(
    values: Iterable[tuple[int, object]], required: Sequence[str], problems: Problems
) -> Iterator[tuple[int, dict]]:  # fmt: skip
    """(number, row) of every value, which must be an object. A field that the first row lacks ends the reading."""
    rows = 0
    for number, row in values:
        if type(row) is not dict:
            found = JSON_TYPES.get(type(row), "a number")
            problems.add(number, f'expected an object, {{"field": value, ...}}, found {found}')
            continue
        rows += 1
        for name in required:
            if name not in row:
                first = not_found("field", name, list(row))
                problems.add(number, first if rows == 1 else f"field {short(name)} is missing: every row needs it")
        if rows == 1:
            problems.raise_any()
        if not problems.total:
            yield number, row
    if not rows and not problems.total:
        problems.add(0, "no rows: the array is empty")
    problems.raise_any()
