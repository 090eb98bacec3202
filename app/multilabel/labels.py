"""Label columns -> the label list and each row's label numbers."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

from finetune.columns import SHOWN, more
from finetune.failure import InputError
from finetune.file_problems import nearest
from finetune.tables import Table

LIST_AS_TEXT = re.compile(r"\[\s*(([\"']).*\2\s*)?\]", re.DOTALL)  # ['a', 'b'], as spreadsheets and pandas write a list
ONE, ZERO = {"1", "true", "True", "TRUE", "1.0"}, {"0", "false", "False", "FALSE", "0.0"}


def label_names(table: Table, arguments: Any, notes: list[str]) -> list[list[str]]:
    """Each row's labels as written, without repetition.

    A cell is a list of texts or of whole numbers, or one text split at --label_separator (empty: no label), or with
    --label_columns the names of the columns that hold 1. Whole numbers become their digits. Raises `InputError` for cells of
    another type and for files that mix types, each with its line.
    """
    if arguments.label_columns:
        return _from_columns(table, arguments.label_columns)
    problems: list[str] = []
    kinds: dict[str, int] = {}
    rows, repeated = [], 0
    read: dict[Any, tuple[list[str], str, bool]] = {}  # the same few cells come again and again; rows share what is read
    for row, cell in enumerate(table.columns[arguments.label_column]):
        known = _key(cell)
        if known is None or (found := read.get(known)) is None:
            names, kind = _names(cell, arguments.label_separator)
            distinct = list(dict.fromkeys(names))
            found = (distinct, kind, len(distinct) < len(names))
            if known is not None and kind in ("a text", "a list of texts"):
                read[known] = found
        names, kind, repeats = found
        if kind.startswith("!"):
            problems.append(f"{table.where(row)}: {arguments.label_column} {kind[1:]}")
            names = []
        elif kind:
            kinds.setdefault(kind, row)
        repeated += repeats
        rows.append(names)
    if len(kinds) > 1:
        (first, first_row), (second, second_row) = list(kinds.items())[:2]
        problems.append(
            f"{table.where(second_row)}: {arguments.label_column} is {second}, but {first} at {table.where(first_row)}; "
            "use one form in the whole file"
        )
    if problems:
        raise InputError(*problems[:SHOWN], *more(len(problems)))
    if repeated:
        notes.append(f"{table.path}: {repeated} row(s) name a label twice; it counts once")
    if set(kinds) == {"a text"}:
        notes += _other_separator(table, rows, arguments.label_separator)
    return rows


def _other_separator(table: Table, rows: list[list[str]], separator: str) -> list[str]:
    """A note on labels that look like several: every row has one at most, and many have another mark inside."""
    if any(len(names) > 1 for names in rows):
        return []
    labelled = sum(map(len, rows))
    for mark in ",;":
        if mark != separator and 4 * sum(mark in name for names in rows for name in names) > labelled:
            return [f"{table.path}: no row has two labels, but many labels hold {mark!r}; is --label_separator {mark!r} meant?"]
    return []


def read_label_file(path: str) -> list[str]:
    """The labels of --label_file, one a line, in its order. Raises `InputError`."""
    try:
        names = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except OSError as error:
        raise InputError(f"--label_file {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--label_file {path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    for name in names:
        if "\0" in name or LIST_AS_TEXT.fullmatch(name):
            what = "a NUL character" if "\0" in name else f"a list, {name!r:.60}"
            raise InputError(f"--label_file {path}: holds {what}; write one label a line, in UTF-8")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"--label_file {path}: {', '.join(map(repr, twice[:SHOWN]))} stands twice")
    if not names:
        raise InputError(f"--label_file {path}: holds no label")
    return names


def first_appearance(rows: list[list[str]]) -> list[str]:
    """The label list of training rows: every label in the order in which it is first met."""
    return list(dict.fromkeys(name for names in rows for name in names))


def label_ids(
    table: Table,
    rows: list[list[str]],
    labels: list[str],
    ignore_unknown: bool,
    notes: list[str],
    source: str = "training data",
) -> list[list[int]]:
    """Each row's label numbers. Raises `InputError` listing the labels that the label list lacks, with their lines, unless
    `ignore_unknown`: then they are left out and counted in a note. `source`: where the label list is from."""
    number = {name: i for i, name in enumerate(labels)}
    unknown: dict[str, list[int]] = {}
    ids = []
    for row, names in enumerate(rows):
        try:
            ids.append(sorted(map(number.__getitem__, names)))
        except KeyError:
            for name in names:
                if name not in number:
                    unknown.setdefault(name, []).append(row)
            ids.append(sorted(number[name] for name in names if name in number))
    if unknown and ignore_unknown:
        count = sum(map(len, unknown.values()))
        notes.append(f"{table.path}: {count} label(s) of {len(unknown)} kind(s) that the {source} does not have are ignored")
    elif unknown:
        advice = "correct it, name it in --label_file, or leave such labels out with --unknown_labels ignore"
        shown = []
        for name, found in list(unknown.items())[:SHOWN]:
            near = nearest(name, labels)
            meant = f"; did you mean {near!r}?" if near else ""
            where = f"{table.where(found[0])}: label {name!r:.80}"
            shown.append(f"{where} is not in the {source} ({len(found)} row(s)){meant}; {advice}")
        raise InputError(*shown, *more(len(unknown)))
    return ids


def _key(cell: Any) -> Any:
    """What a cell of texts can be looked up by; None for others. Of numbers, 1, 1.0 and True would be the same."""
    if type(cell) is str:
        return cell
    if type(cell) is list and cell and type(cell[0]) is str:
        with contextlib.suppress(TypeError):  # something in it cannot be hashed
            hash(key := tuple(cell))
            return key
    return None


def _names(cell: Any, separator: str) -> tuple[list[str], str]:
    """(labels, the cell's form); a form that starts with "!" is a complaint. A row without labels has no form."""
    if isinstance(cell, str):
        if not cell.strip():
            return [], ""
        if cell.lstrip()[0] == "[" and LIST_AS_TEXT.fullmatch(cell.strip()):
            return [], f"!{cell!r:.60} is a list written as a text; write a{separator}b, or use a jsonl file, which has lists"
        parts = [part.strip() for part in cell.split(separator)]
        if not all(parts):
            return [], f"!{cell!r:.60} has an empty label between separators {separator!r}"
        return parts, "a text"
    if isinstance(cell, list | tuple):
        types = set(map(type, cell))
        if types <= {str}:
            names = list(map(str.strip, cell))
            if not all(names):
                return [], "!holds an empty label"
            return names, "a list of texts" if cell else ""
        if types == {int}:
            return [str(item) for item in cell], "a list of numbers"
        return [], f"!{cell!r:.80} mixes types; expected a list of texts or a list of whole numbers"
    if isinstance(cell, int) and not isinstance(cell, bool):
        return [str(cell)], "a number"
    if cell is None:
        return [], "!is missing; write an empty list or an empty text for a row without labels"
    return [], f"!is {cell!r:.60} ({type(cell).__name__}), expected a list or a text"


def _from_columns(table: Table, names: tuple[str, ...]) -> list[list[str]]:
    problems: list[str] = []
    rows: list[list[str]] = [[] for _ in table.lines]
    for name in names:
        for row, cell in enumerate(table.columns[name]):
            text = str(cell).strip()
            if text in ONE:
                rows[row].append(name)
            elif text not in ZERO:
                problems.append(f"{table.where(row)}: {name} is {cell!r:.60}, expected 0 or 1")
    if problems:
        raise InputError(*problems[:SHOWN], *more(len(problems)))
    return rows
