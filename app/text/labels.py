"""Label columns -> the label list and each row's label numbers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.errors import InputError
from finetune.reading.columns import SHOWN, more
from finetune.reading.problems import nearest
from finetune.reading.ragged import Ragged
from finetune.reading.tables import Table

LIST_AS_TEXT = re.compile(r"\[\s*(([\"']).*\2\s*)?\]", re.DOTALL)  # ['a', 'b'], as spreadsheets and pandas write a list
ONE, ZERO = {"1", "true", "True", "TRUE", "1.0"}, {"0", "false", "False", "FALSE", "0.0"}


@dataclass(frozen=True)
class Labelled:
    """Rows' labels as written: `names` in the order of their first appearance, `rows` their numbers in it, in a row's own order
    and without repetition. `of_columns`: the names are those of --label_columns, whether a row has them or not."""

    names: list[str]
    rows: Ragged
    of_columns: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: np.ndarray) -> Labelled:
        """These rows' labels, as if the rows had been read alone."""
        taken = self.rows.take(rows)
        if self.of_columns:
            return Labelled(self.names, taken, True)
        first = _first_places(taken.values, len(self.names))
        there = np.argsort(first)[: np.count_nonzero(first < len(taken.values))]
        number = np.zeros(len(self.names), taken.values.dtype)
        number[there] = np.arange(len(there))
        return Labelled([self.names[name] for name in there], Ragged(number[taken.values], taken.offsets))


def label_names(table: Table, arguments: Any, notes: list[str]) -> Labelled:
    """Each row's labels.

    A cell is a list of texts or of whole numbers, or one text split at --label_separator (empty: no label), or with
    --label_columns the names of the columns that hold 1. Whole numbers become their digits. Raises `InputError` for cells of
    another type and for files that mix types, each with its line.
    """
    if arguments.label_columns:
        return _from_columns(table, arguments.label_columns)
    cells, codes = table.columns[arguments.label_column].distinct()  # the same few come again and again
    rows_with, first_row = np.bincount(codes, minlength=len(cells)), _first_places(codes, len(cells))
    number: dict[str, int] = {}
    kinds: dict[str, int] = {}
    wrong: dict[int, str] = {}
    read, repeated = [], 0
    for code, cell in enumerate(cells):
        names, kind = _names(cell, arguments.label_separator)
        distinct = dict.fromkeys(names)
        if kind.startswith("!"):
            wrong[code], distinct = kind[1:], {}
        elif kind:
            kinds.setdefault(kind, first_row[code])
        if len(distinct) < len(names):
            repeated += rows_with[code]
        read.append([number.setdefault(name, len(number)) for name in distinct])
    problems = _wrong_cells(table, arguments.label_column, wrong, codes)
    if len(kinds) > 1:
        (first, first_row), (second, second_row) = list(kinds.items())[:2]
        problems.append(
            f"{table.where(second_row)}: {arguments.label_column} is {second}, but {first} at {table.where(first_row)}; "
            "use one form in the whole file"
        )
    if problems:
        raise InputError(*problems[:SHOWN], *more(sum(rows_with[code] for code in wrong) + (len(kinds) > 1)))
    if repeated:
        notes.append(f"{table.path}: {repeated} row(s) name a label twice; it counts once")
    found = Labelled(list(number), Ragged.of(read).take(codes))
    if set(kinds) == {"a text"}:
        notes += _other_separator(table, found, arguments.label_separator)
    return found


def _first_places(codes: np.ndarray, count: int) -> np.ndarray:
    """(count,) where each code stands first; the number of places for a code that does not."""
    places = np.full(count, len(codes))
    np.minimum.at(places, codes, np.arange(len(codes)))
    return places


def _wrong_cells(table: Table, column: str, wrong: dict[int, str], codes: np.ndarray) -> list[str]:
    """The first complaints, in the order of their rows, about cells with these codes."""
    if not wrong:
        return []
    rows = np.flatnonzero(np.isin(codes, list(wrong)))[:SHOWN]
    return [f"{table.where(row)}: {column} {wrong[codes[row]]}" for row in rows.tolist()]


def _other_separator(table: Table, found: Labelled, separator: str) -> list[str]:
    """A note on labels that look like several: every row has one at most, and many have another mark inside."""
    if found.rows.lengths.max(initial=0) > 1:
        return []
    count = np.bincount(found.rows.values, minlength=len(found.names))
    for mark in ",;":
        if mark != separator and 4 * sum(count[i] for i, name in enumerate(found.names) if mark in name) > count.sum():
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


def choose_labels(
    own: list[str] | None, found: list[str], label_file: str | None, notes: list[str], path: str = "training data"
) -> list[str]:
    """The labels to be trained, in their order: those of `label_file`, or those that the training rows have (`found`), in the
    order of the model's `own` where these are the same. Notes what becomes of the model's head. Raises `InputError` for a bad
    file, and if no row of `path` has a label."""
    labels = read_label_file(label_file) if label_file else found
    if not labels:
        raise InputError(f"{path}: no row has a label; name the labels with --label_file if that is meant")
    if not label_file and own is not None and set(own) == set(found):
        labels = own
    if own is not None and own != labels:
        notes.append(_note_head(own, labels))
    return labels


def _note_head(own: list[str], labels: list[str]) -> str:
    kept = set(own) & set(labels)
    if not kept:
        return f"the model's head for {len(own)} label(s) is replaced by a new one for {len(labels)}"
    new, dropped = len(set(labels) - kept), len(set(own) - kept)
    return f"the model's head keeps the rows of {len(kept)} label(s), by name; {new} label(s) are new, {dropped} are dropped"


def label_source(arguments: Any, trains: bool) -> str:
    """Where a run's label list comes from, in words."""
    if not trains:
        return f"labels of {arguments.model_name_or_path}"
    return "training data" if arguments.label_file is None else f"--label_file {arguments.label_file}"


def one_hot(labels: Ragged, rows: np.ndarray, num_labels: int) -> torch.Tensor:
    """(b, labels) float32: 1 where a row has the label."""
    dense = torch.zeros(len(rows), num_labels)
    counts = labels.offsets[rows + 1] - labels.offsets[rows]
    if counts.sum():
        dense[np.repeat(np.arange(len(rows)), counts), np.concatenate([labels[row] for row in rows])] = 1
    return dense


def label_ids(
    table: Table,
    found: Labelled,
    labels: list[str],
    ignore_unknown: bool,
    notes: list[str],
    source: str = "training data",
) -> Ragged:
    """Each row's label numbers, ascending. Raises `InputError` listing the labels that the label list lacks, with their lines,
    unless `ignore_unknown`: then they are left out and counted in a note. `source`: where the label list is from."""
    place = {name: i for i, name in enumerate(labels)}
    numbers = np.array([place.get(name, -1) for name in found.names], dtype=np.int32)[found.rows.values]
    rows = found.rows.row_numbers
    known = numbers >= 0
    used = np.bincount(found.rows.values, minlength=len(found.names))  # a column of --label_columns may hold no 1
    unknown = [name for name, count in zip(found.names, used, strict=True) if count and name not in place]
    if unknown and ignore_unknown:
        count = int((~known).sum())
        notes.append(f"{table.path}: {count} label(s) of {len(unknown)} kind(s) that the {source} does not have are ignored")
    elif unknown:
        advice = "correct it, name it in --label_file, or leave such labels out with --unknown_labels ignore"
        shown, number = [], {name: i for i, name in enumerate(found.names)}
        for name in unknown[:SHOWN]:
            near = nearest(name, labels)
            meant = f"; did you mean {near!r}?" if near else ""
            there = rows[found.rows.values == number[name]]
            where = f"{table.where(int(there[0]))}: label {name!r:.80}"
            shown.append(f"{where} is not in the {source} ({len(there)} row(s)){meant}; {advice}")
        raise InputError(*shown, *more(len(unknown)))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[known], minlength=len(found)))])
    # One sort of whole numbers, row before label: a fifth of np.lexsort's time.
    width = max(1, len(labels))
    return Ragged((np.sort(rows[known] * width + numbers[known]) % width).astype(numbers.dtype), offsets)


def note_labels(splits: dict[str, tuple[str, Ragged]], labels: list[str], notes: list[str]) -> None:
    """Notes what a reader of the metrics should know: rows without labels, and labels without rows. `splits`: (path, label
    numbers of each row) of "train" and, if there is one, "validation"."""
    rows = splits["train"][1]
    notes.append(f"{len(labels)} labels, {len(rows.values) / len(rows):.2f} per training row")
    counts = {name: np.bincount(rows.values, minlength=len(labels)) for name, (_, rows) in splits.items()}
    for name, (path, rows) in splits.items():
        if bare := int((rows.lengths == 0).sum()):
            notes.append(f"{path}: {bare} row(s) have no label")
        if name == "train" and (never := [labels[label] for label in np.flatnonzero(counts[name] == 0)]):
            notes.append(f"no training row has {_listed(never)}")
    if "validation" in splits:
        size = len(splits["validation"][1])
        undefined = [label for label, count in zip(labels, counts["validation"], strict=True) if count in (0, size)]
        if undefined:
            notes.append(
                f"ROC AUC is undefined for {len(undefined)} label(s) that no or every validation row has, and left out of its "
                f"average: {_listed(undefined)}"
            )


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"


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
        return [], (
            "!is missing; write an empty list or an empty text for a row without labels (a data set of csv files loses empty "
            "texts: name the files by --train_file and --validation_file)"
        )
    return [], f"!is {cell!r:.60} ({type(cell).__name__}), expected a list or a text"


def _from_columns(table: Table, names: tuple[str, ...]) -> Labelled:
    problems: list[str] = []
    wrong_rows = 0
    labels, rows = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for label, name in enumerate(names):
        cells, codes = table.columns[name].distinct()
        texts = [str(cell).strip() for cell in cells]
        wrong = {
            code: f"is {cell!r:.60}, expected 0 or 1"
            for code, (cell, text) in enumerate(zip(cells, texts, strict=True))
            if text not in ONE | ZERO
        }
        problems += _wrong_cells(table, name, wrong, codes)
        wrong_rows += int(np.isin(codes, list(wrong)).sum())
        rows.append(np.flatnonzero(np.array([text in ONE for text in texts], dtype=bool)[codes]))
        labels.append(np.full(len(rows[-1]), label, np.int32))
    if problems:
        raise InputError(*problems[:SHOWN], *more(wrong_rows))
    everywhere, numbers = np.concatenate(rows), np.concatenate(labels)
    order = np.argsort(everywhere, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(everywhere, minlength=len(table)))])
    return Labelled(list(names), Ragged(numbers[order], offsets), of_columns=True)
