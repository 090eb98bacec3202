"""From a file's columns to what a task needs: texts, ids, splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np

from finetune.errors import InputError
from finetune.reading.problems import described
from finetune.reading.stored_rows import LINE, Column
from finetune.reading.tables import Table, read_table

SHOWN = 20
# In RE2's words: separators, control and format characters, such as those of zero width.
SHOWS_NOTHING = r"\A[\pZ\p{Cc}\p{Cf}]*\z"


def read_splits(
    arguments: Any, required: dict[str, tuple[str, ...]], train: bool, *, optional: tuple[str, ...]
) -> dict[str, Table]:
    """The tables of the splits in `required`, which gives the columns that each must have. `optional`: columns that are read
    as well where a file has them; no others are.

    A missing validation table is no error where training rows can be kept back. Raises `InputError` for all the files that
    are missing or wrong, in one list.
    """
    tables, problems = {}, []
    names = max(required.values(), key=len, default=())
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise InputError(f"column {twice[0]!r} is used twice; texts and targets need columns of their own")
    for split, columns in required.items():
        others = optional
        if split == "test":
            if arguments.id_column == "id":  # the default need not be there
                others = (*others, "id")
            else:
                columns = (*columns, arguments.id_column)
        try:
            table = read_split(arguments, split, columns, others)
        except InputError as error:
            problems += error.problems
            continue
        if table is not None:
            tables[split] = table
        elif split != "validation" or not train:
            problems.append(f"no {split} rows: give --{split}_file or --dataset_name")
    if problems:
        raise InputError(*problems)
    return tables


def read_split(arguments: Any, split: str, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> Table | None:
    """The rows of "train", "validation" or "test", from its file or from --dataset_name; None when neither is given.

    Raises `InputError` for whatever is wrong with the file.
    """
    file = getattr(arguments, f"{split}_file")
    if file is not None:
        table = read_table(file, arguments.encoding, required, optional)
    elif arguments.dataset_name is not None:
        table = _dataset_split(arguments, split, required, optional)
    else:
        return None
    limit = {"train": "max_train_samples", "validation": "max_eval_samples", "test": "max_predict_samples"}[split]
    most = getattr(arguments, limit)
    return table if table is None or most is None or most >= len(table) else take(table, np.arange(most))


def take(table: Table, rows: np.ndarray) -> Table:
    """A table of some of the rows, which still knows where they stand in the file."""
    columns = {name: column.take(rows) for name, column in table.columns.items()}
    return Table(table.path, table.kind, columns, table.lines.take(rows))


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


def drop_blank(table: Table, column: str, notes: list[str]) -> Table:
    """Leaves out training rows whose text shows nothing, with a note. Raises `InputError` if none is left."""
    texts = texts_of(table, column)
    blank = blank_rows(texts)
    if len(blank) == len(texts):
        raise InputError(f"{table.path}: every {column} is empty; nothing to train on")
    if not len(blank):
        return table
    lost = table.lines.take(blank)
    lines = ", ".join(map(str, lost[:SHOWN]))
    notes.append(
        f"{table.path}: {len(lost)} row(s) without a text left out (line {lines}{', ...' if len(lost) > SHOWN else ''})"
    )
    return take(table, np.setdiff1d(np.arange(len(texts)), blank))


def note_blank(table: Table, texts: Column, notes: list[str]) -> None:
    """Notes rows that are scored or predicted though their text shows nothing."""
    if blank := len(blank_rows(texts)):
        notes.append(f"{table.path}: {blank} row(s) have no text; they are kept and read as an empty text")


def note_cut(table: Table, what: str, cut: np.ndarray, limit: int, notes: list[str]) -> None:
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


def _dataset_split(arguments: Any, split: str, required: tuple[str, ...], optional: tuple[str, ...]) -> Table | None:
    name = arguments.dataset_name
    try:
        everything = datasets.load_dataset(name, arguments.dataset_config_name, cache_dir=arguments.cache_dir)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"--dataset_name {name}: cannot be loaded ({reason})") from error
    if split not in everything:
        return None
    check_columns(everything[split], f"dataset {name}, split {split}", required)
    return table_of(everything[split], f"{name} ({split})", required, optional)


def check_columns(rows: datasets.Dataset, what: str, required: Sequence[str]) -> None:
    """Raises `InputError` for required columns that rows of `datasets` lack. `what`: they, in words."""
    missing = [column for column in required if column not in rows.column_names]
    if missing:
        raise InputError(*(f"{what}: has no column {c!r}; it has {', '.join(rows.column_names)}" for c in missing))


def table_of(rows: datasets.Dataset, path: str, required: Sequence[str], optional: Sequence[str]) -> Table:
    """Rows of `datasets` as a table of these columns, which `check_columns` has found there."""
    columns = {c: _named(rows, c) for c in dict.fromkeys([*required, *optional]) if c in rows.column_names}
    columns = {c: column for c, column in columns.items() if c in required or not column.is_empty}
    lines = datasets.Dataset.from_dict({LINE: np.arange(1, len(rows) + 1)})
    # A dataset has rows, not lines; "parquet" is the kind whose places are row numbers.
    return Table(path, "parquet", columns, Column(lines, LINE))


def _named(rows: datasets.Dataset, column: str) -> Column:
    """A column; numbers of a ClassLabel, also in lists, as their names."""
    feature, cells = rows.features[column], Column(rows, column)
    inner = getattr(feature, "feature", None)
    if isinstance(feature, datasets.ClassLabel):
        return Column.of(_name(feature.names, cell) for cell in cells)
    if isinstance(inner, datasets.ClassLabel):
        return Column.of(cell and [_name(inner.names, number) for number in cell] for cell in cells)
    return cells


def _name(names: list[str], number: int | None) -> str | None:
    """The name of a class; None for -1, which stands for rows without one."""
    return None if number is None or number < 0 else names[number]
