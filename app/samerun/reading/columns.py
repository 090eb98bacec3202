"""Checks and conversions of a table's columns: texts, ids, validation rows."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from samerun.errors import InputError
from samerun.reading.problems import SHOWN, described, raise_problems
from samerun.reading.stored_rows import Column
from samerun.reading.tables import Table

# A blank text has only separators, control characters and format characters (such as zero-width ones): in
# RE2's syntax, ...
BLANK_PATTERN = r"\A[\pZ\p{Cc}\p{Cf}]*\z"
BLANK_CATEGORIES = {"Zs", "Zl", "Zp", "Cc", "Cf"}  # ... and as categories of unicodedata


def take(table: Table, rows: np.ndarray) -> Table:
    """Some rows of a table, with their original line numbers."""
    columns = {name: column.take(rows) for name, column in table.columns.items()}
    source = None if table.source is None else table.source[rows]
    return replace(table, columns=columns, lines=table.lines.take(rows), source=source)


def split_off(table: Table, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (training rows, validation rows) as ascending row numbers; `share` of the rows, at random, for
    validation.

    The result depends on the seed and the number of rows alone. Raises `InputError` for fewer than two rows.
    """
    if len(table) < 2:
        raise InputError(
            f"{table.path}: has {len(table)} row(s), too few to take validation rows from; give "
            "--validation_file"
        )
    count = min(max(1, round(len(table) * share)), len(table) - 1)
    held_out = np.zeros(len(table), dtype=bool)
    held_out[np.random.default_rng([seed, 0]).permutation(len(table))[:count]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def texts_of(table: Table, column: str) -> Column:
    """A column of texts. Raises `InputError` for cells of other types, each with its line."""
    values = table.columns[column]
    wrong = [] if values.is_text else [row for row, value in enumerate(values) if not isinstance(value, str)]
    raise_problems(
        [f"{table.where(row)}: {column} is {described(values[row])}, expected a text" for row in wrong]
    )
    return values


def blank_rows(texts: Column) -> np.ndarray:
    """The numbers of the rows without visible text, ascending."""
    return np.flatnonzero(texts.matches(BLANK_PATTERN))


def is_blank(text: str) -> bool:
    """Whether a text has no visible characters: the rule of `blank_rows`."""
    return all(unicodedata.category(character) in BLANK_CATEGORIES for character in text)


def drop_blank(table: Table, column: str, notes: list[str]) -> Table:
    """Removes training rows without visible text and adds a note. Raises `InputError` if no row is left."""
    texts = texts_of(table, column)
    blank = blank_rows(texts)
    if len(blank) == len(texts):
        raise InputError(f"{table.path}: every {column} is empty; nothing to train on")
    if not len(blank):
        return table
    if table.source is None:
        shown = f"line {', '.join(map(str, table.lines.take(blank[:SHOWN])))}"
    else:
        shown = ", ".join(map(table.where, blank[:SHOWN].tolist()))
    notes.append(
        f"{table.path}: {len(blank)} row(s) without a text left out "
        f"({shown}{', ...' if len(blank) > SHOWN else ''})"
    )
    return take(table, np.setdiff1d(np.arange(len(texts)), blank))


def note_blank(table: Table, texts: Column, notes: list[str]) -> None:
    """Adds a note about evaluation rows without visible text, which are kept."""
    if blank := len(blank_rows(texts)):
        notes.append(f"{table.path}: {blank} row(s) have no text; they are kept and read as an empty text")


def note_cut(table: Table, what: str, cut: np.ndarray, limit: int | str, notes: list[str]) -> None:
    """Adds a note about truncated texts. `what`: their plural noun; `cut`: (rows,) bool; `limit`: in
    tokens."""
    if count := int(cut.sum()):
        notes.append(
            f"{table.path}: {count} of {len(table)} {what} ({count / len(table):.1%}) are cut to "
            f"{limit} tokens"
        )


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


def note_repeated_texts(texts: dict[str, Column], notes: list[str]) -> None:
    """Adds notes about duplicate training texts, and about validation and test texts that are also training
    texts.

    `texts`: by split.
    """
    hashes = {split: list(map(hash, column)) for split, column in texts.items()}
    seen = set(hashes["train"])
    if repeated := len(hashes["train"]) - len(seen):
        notes.append(f"{repeated} training row(s) repeat the text of an earlier row")
    for split in ("validation", "test"):
        if shared := sum(value in seen for value in hashes.get(split, [])):
            notes.append(f"{shared} of {len(texts[split])} {split} texts are in the training rows too")
