"""Rows of JSON files: an array of objects (json) or one object per line (jsonl)."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from samerun.errors import InputError
from samerun.reading.problems import Problems, not_found, quoted
from samerun.reading.text_files import read_text, text_lines

JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def read_json(path: str, encoding: str, required: Sequence[str]) -> tuple[str, Iterator[tuple[int, dict]]]:
    """Returns ("json", numbered rows) for an array, which is read as a whole, or ("jsonl", rows with their
    lines).

    The iterator of the rows yields nothing after the first problem. At its end it raises `InputError` with
    all problems.
    """
    lines = (
        (number, line) for number, line in enumerate(text_lines(path, encoding, None), 1) if line.strip()
    )
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}: no rows: only blank lines")
    if first[1].lstrip().startswith("["):
        problems, text = Problems(path, "json"), "".join(text_lines(path, encoding, None))
        return "json", _rows_of(enumerate(_decode(path, text), 1), required, problems)
    problems = Problems(path, "jsonl")
    return "jsonl", _rows_of(_line_values(chain([first], lines), problems), required, problems)


def read_object(path: str | Path) -> dict:
    """Reads a JSON file that holds one object, such as a configuration.

    Raises `InputError` with file and line; duplicate keys, NaN and infinite numbers are errors, too.
    """
    content = _decode(str(path), read_text(path))
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
        line = line_with_end.removesuffix(
            "\n"
        )  # else an unclosed string is reported as a line break in a string
        try:
            value = DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            if line.strip() == "{":
                problems.add(number, "an object over several lines: write each on one line")
            else:
                problems.add(number, _broken_json(error, line))
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
) -> Iterator[tuple[int, dict]]:  # fmt: skip
    """Yields (number, row) of every value, which must be an object. Stops if the first row lacks a required
    field."""
    rows = 0
    for number, row in values:
        if type(row) is not dict:
            type_name = JSON_TYPES.get(type(row), "a number")
            problems.add(number, f'expected an object, {{"field": value, ...}}, found {type_name}')
            continue
        rows += 1
        for name in required:
            if name not in row:
                in_first_row = not_found("field", name, list(row))
                problems.add(
                    number,
                    in_first_row if rows == 1 else f"field {quoted(name)} is missing: every row needs it",
                )
        if rows == 1:
            problems.raise_any()
        if not problems.total:
            yield number, row
    if not rows and not problems.total:
        problems.add(0, "no rows: the array is empty")
    problems.raise_any()
