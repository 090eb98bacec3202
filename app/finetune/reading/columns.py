"""From a file's columns to what a task needs: texts, ids, rows that are kept for validation."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from finetune.errors import InputError
from finetune.reading.problems import described
from finetune.reading.stored_rows import Column
from finetune.reading.tables import Table

SHOWN = 20
# In RE2's words: separators, control and format characters, such as those of zero width.
SHOWS_NOTHING = r"\A[\pZ\p{Cc}\p{Cf}]*\z"
INVISIBLE = {"Zs", "Zl", "Zp", "Cc", "Cf"}  # the same as unicodedata names them


def take(table: Table, rows: np.ndarray) -> Table:
    """A table of some of the rows, which still knows where they stand in the file."""
    columns = {name: column.take(rows) for name, column in table.columns.items()}
    source = None if table.source is None else table.source[rows]
    return replace(table, columns=columns, lines=table.lines.take(rows), source=source)


def split_off(table: Table, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of (training rows, validation rows): a random share, the same for the same seed and number of rows; in file
    order. Raises `InputError` for a table of fewer than two rows."""
    if len(table) < 2:
        raise InputError(f"{table.path}: has {len(table)} row(s), too few to take validation rows from; give --validation_file")
    count = min(max(1, round(len(table) * share)), len(table) - 1)
    held_out = np.zeros(len(table), dtype=bool)
    held_out[np.random.default_rng([seed, 0]).permutation(len(table))[:count]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def texts_of(table: Table, column: str) -> Column:
    """A column of texts. Raises `InputError` for cells that are no text, each with its line."""
    values = table.columns[column]
    wrong = [] if values.is_text else [row for row, value in enumerate(values) if not isinstance(value, str)]
    if wrong:
        shown = [f"{table.where(r)}: {column} is {described(values[r])}, expected a text" for r in wrong[:SHOWN]]
        raise InputError(*shown, *more(len(wrong)))
    return values


def blank_rows(texts: Column) -> np.ndarray:
    """The rows whose text shows nothing, in ascending order."""
    return np.flatnonzero(texts.matches(SHOWS_NOTHING))


def shows_nothing(text: str) -> bool:
    """Whether `blank_rows` would find this text."""
    return all(unicodedata.category(character) in INVISIBLE for character in text)


def drop_blank(table: Table, column: str, notes: list[str]) -> Table:
    """Leaves out training rows whose text shows nothing, with a note. Raises `InputError` if none is left."""
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
    notes.append(f"{table.path}: {len(blank)} row(s) without a text left out ({shown}{', ...' if len(blank) > SHOWN else ''})")
    return take(table, np.setdiff1d(np.arange(len(texts)), blank))


def note_blank(table: Table, texts: Column, notes: list[str]) -> None:
    """Notes rows that are scored or predicted though their text shows nothing."""
    if blank := len(blank_rows(texts)):
        notes.append(f"{table.path}: {blank} row(s) have no text; they are kept and read as an empty text")


def note_cut(table: Table, what: str, cut: np.ndarray, limit: int | str, notes: list[str]) -> None:
    """Notes how many of the `what` lose their end. `cut`: (rows,) bool; `limit`: the tokens that each may have."""
    if count := int(cut.sum()):
        notes.append(f"{table.path}: {count} of {len(table)} {what} ({count / len(table):.1%}) are cut to {limit} tokens")


def ids_of(table: Table, column: str) -> Sequence[Any]:
    """What names each row in predictions: its cell in `column`, or its number from 0."""
    return table.columns.get(column, range(len(table)))


def check_ids(table: Table, column: str) -> None:
    """Raises `InputError` for ids that predictions, which are JSON, cannot hold: better known now than when everything is
    predicted."""
    wrong = []
    for row, value in enumerate(table.columns.get(column, [])):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            wrong.append(f"{table.where(row)}: {column} is {described(value)}, expected a text or a number")
    if wrong:
        raise InputError(*wrong[:SHOWN], *more(len(wrong)))


def note_repeated_texts(texts: dict[str, Column], notes: list[str]) -> None:
    """Notes how many training texts stand twice, and how many of the other files' are among them. `texts`: by split."""
    hashes = {split: list(map(hash, column)) for split, column in texts.items()}
    seen = set(hashes["train"])
    if repeated := len(hashes["train"]) - len(seen):
        notes.append(f"{repeated} training row(s) repeat the text of an earlier row")
    for split in ("validation", "test"):
        if shared := sum(value in seen for value in hashes.get(split, [])):
            notes.append(f"{shared} of {len(texts[split])} {split} texts are in the training rows too")


def more(count: int) -> list[str]:
    """The line that stands for the problems beyond the first 20."""
    return [f"... and {count - SHOWN} more"] if count > SHOWN else []
