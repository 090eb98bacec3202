"""Labels of texts: cells of files, --label_file, and label numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress
from typing import Any
from unicodedata import category, normalize

import numpy as np

from samerun.classes import in_order
from samerun.data.tables import Table
from samerun.data.tokens import Ragged
from samerun.errors import SHOWN, InputError, described, listed, more, nearest, raise_problems
from samerun.files import read_text
from samerun.models.pretrained import note_changed_classes, own_labels

TRAINED_HEADS = ("ForSequenceClassification", "ForTokenClassification")  # ends of model classes
OF_MODEL = "labels of "  # begins the source of labels that a model has
# ['a', 'b'], as pandas writes a list to csv
LIST_AS_TEXT = re.compile(r"\[\s*(([\"']).*\2\s*)?\]", re.DOTALL)
DIGITS = re.compile(r"\d+")
FEW = 2  # training rows of a label that may be misspelt; the other one has ten times as many
OF_BITS = "give the numbers or names of a row's labels, or --label_columns, with a column of 0 and 1 for each"
BITS = {"1": True, "true": True, "1.0": True, "0": False, "false": False, "0.0": False}


@dataclass(frozen=True)
class Labelled:
    """The distinct labels of each row. `declared`: all labels of --label_columns or of a ClassLabel column,
    used or not; of rows with one label each, all of theirs, in order. `separator`: where texts were split."""

    rows: list[tuple[str, ...]]
    declared: tuple[str, ...] = ()
    separator: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def names(self) -> list[str]:
        """All labels, in the declared order or in the order of first appearance."""
        return list(self.declared or dict.fromkeys(chain.from_iterable(self.rows)))

    def take(self, rows: np.ndarray) -> Labelled:
        return replace(self, rows=[self.rows[row] for row in rows.tolist()])


def read_labels(table: Table, arguments: Any, notes: list[str]) -> Labelled | None:
    """The labels of each row of a file; None for a file without labels.

    A cell of --label_column is a list of texts or integers, or one text split at --label_separator (empty: no
    label). Integers are converted to text. A ClassLabel is never split. With --label_columns a row has the
    labels whose columns hold 1.

    Raises `InputError` with the line for cells of another type and for files that mix types.
    """
    columns = arguments.label_columns or (arguments.label_column,)
    if any(column not in table.columns for column in columns):
        return None
    if arguments.label_columns:
        return _from_bits(table, arguments.label_columns)
    column, separator, problems = arguments.label_column, arguments.label_separator, []
    declared = tuple(table.classes.get(column, ()))
    if declared:
        separator = None
    first_rows: dict[str, int] = {}  # by the form of the cell
    interned: dict[tuple[str, ...], tuple[str, ...]] = {}  # saves memory: many rows have the same labels
    rows, repeated = [], 0
    for row, cell in enumerate(table.columns[column]):
        try:
            names, form = _parse_cell(cell, separator)
        except ValueError as error:
            problems.append(f"{table.where(row)}: {column} {error}")
            continue
        if form:
            first_rows.setdefault(form, row)
        distinct = tuple(dict.fromkeys(names))
        repeated += len(distinct) < len(names)
        rows.append(interned.setdefault(distinct, distinct))
    if len(first_rows) > 1:
        (first, first_row), (second, second_row) = list(first_rows.items())[:2]
        problems.append(
            f"{table.where(second_row)}: {column} is {second}, but {first} at {table.where(first_row)}; use "
            "one form everywhere"
        )
    raise_problems(problems)
    if repeated and set(first_rows) == {"a list of numbers"} and set(chain.from_iterable(rows)) <= {"0", "1"}:
        raise InputError(f"{table.path}: {column} has lists of 0 and 1 alone; {OF_BITS}")
    if repeated:
        notes.append(f"{table.path}: {repeated} row(s) name a label twice; it counts once")
    if set(first_rows) == {"a text"} and max(map(len, rows)) == 1 and not declared:
        only_labels = [names[0] for names in rows if names]
        for mark in sorted(set(",;|，；、｜") - {separator}):
            joined = [label for label in only_labels if mark in label]
            parts = {part.strip() for label in joined for part in label.split(mark)}
            if 4 * len(joined) > len(only_labels) or not parts.isdisjoint(only_labels):
                notes.append(
                    f"{table.path}: no row has two labels, but {len(joined)} labels hold {mark!r}; is "
                    f"--label_separator {mark!r} meant?"
                )
    return Labelled(rows, declared, separator if "a text" in first_rows else None)


def _parse_cell(cell: Any, separator: str | None) -> tuple[list[str], str]:
    """(labels, form of the cell); the form is "" without labels. `separator`: None if a text is one label.
    Raises ValueError for a cell of another form."""
    if isinstance(cell, str) and separator is None:
        return [cell], "a text"
    if isinstance(cell, str):
        if not cell.strip():
            return [], ""
        if cell.lstrip()[0] == "[" and LIST_AS_TEXT.fullmatch(cell.strip()):
            raise ValueError(
                f"{cell!r:.60} is a list written as a text; write a{separator}b, or use a jsonl file"
            )
        parts = [part.strip() for part in cell.split(separator)]
        if not all(parts):
            raise ValueError(f"{cell!r:.60} has an empty label between separators {separator!r}")
        return parts, "a text"
    if isinstance(cell, list):
        types = set(map(type, cell))
        if types <= {str}:
            names = list(map(str.strip, cell))
            if not all(names):
                raise ValueError("holds an empty label")
            return names, "a list of texts" if cell else ""
        if types == {float}:
            raise ValueError(f"{cell!r:.60} is a list of decimals; {OF_BITS}")
        if types == {int}:
            return [str(item) for item in cell], "a list of numbers"
        raise ValueError(f"{cell!r:.80} mixes types; expected a list of texts or a list of whole numbers")
    if type(cell) is int:
        return [str(cell)], "a number"
    hint = ""
    if cell is None:
        hint = "; for csv files in a data set, name the files by --train_file: datasets drops empty texts"
    raise ValueError(
        f"is {described(cell)}, expected a list or a text (empty for a row without labels{hint})"
    )


def _from_bits(table: Table, columns: tuple[str, ...]) -> Labelled:
    rows, problems = [], []
    for row, cells in enumerate(zip(*(table.columns[name] for name in columns), strict=True)):
        bits = [BITS.get(str(cell).strip().lower()) for cell in cells]
        if None in bits:
            wrong = bits.index(None)
            problems.append(f"{table.where(row)}: {columns[wrong]} is {cells[wrong]!r:.60}, expected 0 or 1")
        rows.append(tuple(compress(columns, bits)))
    raise_problems(problems)
    return Labelled(rows, columns)


def read_classes(table: Table, column: str, notes: list[str]) -> Labelled | None:
    """The one label of each row; None for a file without the column. A cell is a text, a whole number, or a
    list with one of these. Raises `InputError` with the line of every other cell."""
    if column not in table.columns:
        return None
    rows, problems, interned = [], [], {}
    for row, cell in enumerate(table.columns[column]):
        value = cell[0] if isinstance(cell, list) and len(cell) == 1 else cell
        if type(value) is float and value.is_integer():  # as pandas keeps numbers beside missing ones
            value = int(value)
        name = str(value).strip()
        if type(value) in (str, int, bool) and name:
            rows.append(interned.setdefault(name, (name,)))
            continue
        problem = f"is {described(value) if name else 'empty'}, expected one label: a text or a whole number"
        if isinstance(value, list):
            problem = f"has {len(value)} labels, expected one; several need --problem_type multi_label"
        problems.append(f"{table.where(row)}: {column} {problem}")
    raise_problems(problems)
    declared = tuple(table.classes.get(column, ()))
    if several := 0 if declared else sum("|" in name for (name,) in rows):
        notes.append(
            f"{table.path}: {several} row(s) have a label with '|' in it, which counts as one label; several "
            "need --problem_type multi_label"
        )
    return Labelled(rows, declared or tuple(in_order(name for (name,) in rows)))


def as_number(cell: Any) -> float | None:
    """The finite number in a cell, which may be a text; None for other cells."""
    if isinstance(cell, bool) or not isinstance(cell, int | float | str):
        return None
    try:
        number = float(cell.replace("_", "x") if isinstance(cell, str) else cell)  # Python reads 1_0 as 10
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) < 1e30 else None


def separator_of(labels: Sequence[str], preferred: str) -> str:
    """What separates labels in a cell: `preferred`, or another mark if a label has that."""
    marks = (preferred, *"|;\t")
    return next((mark for mark in marks if mark and not any(mark in name for name in labels)), "\n")


def read_label_file(path: str) -> list[str]:
    """The labels of --label_file, one per line, in its order. Raises `InputError`."""
    names = [line.strip() for line in read_text(path).split("\n") if line.strip()]
    if any("\0" in name or LIST_AS_TEXT.fullmatch(name) for name in names):
        raise InputError(
            f"--label_file {path}: holds a list or a NUL character; write one label per line, in UTF-8"
        )
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f"--label_file {path}: {', '.join(map(repr, repeated[:SHOWN]))} stands twice")
    if not names:
        raise InputError(f"--label_file {path}: holds no label")
    return names


def note_counts(labels: Sequence[str], ids: dict[str, Ragged], streams: bool, notes: list[str]) -> None:
    """Notes labels that training or validation rows lack, and rare labels that are spelt nearly like a common
    one. `ids`: of the labels of each row, by split; `streams`: whether "train" is the first buffer."""
    counts = {name: np.bincount(own.values, minlength=len(labels)) for name, own in ids.items()}
    train_row = "row of buffer 1" if streams else "training row"
    for name, row in (("train", train_row), ("validation", "validation row")):
        if missing := [label for label, n in zip(labels, counts.get(name, ()), strict=False) if n == 0]:
            notes.append(f"no {row} has {listed(missing)}")
    rows = dict(zip(labels, counts["train"].tolist(), strict=True))
    common = {form: label for label in labels if rows[label] >= 10 * FEW for form in _forms(label)}
    slips = []
    for label in (label for label in labels if 0 < rows[label] <= FEW and len(label) > 3):
        near = next((common[form] for form in _forms(label) if form in common), None)
        # Not another case, which `choose_labels` notes, and not class 1 and class 2.
        if near and near.casefold() != label.casefold() and DIGITS.findall(near) == DIGITS.findall(label):
            slips.append(f"{label!r} ({rows[label]}) for {near!r} ({rows[near]})")
    if slips:
        notes.append(f"labels that may be misspelt, with their training rows: {'; '.join(slips[:3])}")


def _forms(label: str) -> list[str]:
    """The label, and it without each of its characters: labels that are a slip apart have one in common."""
    return [label, *(label[:place] + label[place + 1 :] for place in range(len(label)))]


def in_order_of_head(arguments: Any, config: Any, labels: list[str], notes: list[str]) -> list[str]:
    """The training labels in the order of the model's head, if it is trained, has as many rows and no names
    for them (LABEL_0, ...): numbers from 0 are its rows. Others keep their order, with a note."""
    is_trained = any(name.endswith(TRAINED_HEADS) for name in config.architectures or ())
    unnamed = is_trained and not arguments.from_scratch and own_labels(config) is None
    if not unnamed or arguments.label_file or config.num_labels != len(labels):
        return labels
    numbers = list(map(str, range(len(labels))))
    if set(labels) == set(numbers):
        return numbers
    notes.append(
        "the rows of the model's head have no names (LABEL_0, ...) and are taken for the training labels in "
        "this order; --label_file gives another one"
    )
    return labels


def choose_labels(
    arguments: Any, own: list[str] | None, train_labels: list[str], notes: list[str]
) -> list[str]:
    """The labels to train, in order: those of --label_file, else `train_labels`, in the order of the model's
    `own` labels if both are the same set. Notes changes of the head of a pretrained model. Raises
    `InputError` for a bad file, and if no training row has a label."""
    labels = read_label_file(arguments.label_file) if arguments.label_file else train_labels
    if not labels:
        path = " ".join(arguments.train_file or [arguments.dataset_name])
        raise InputError(f"{path}: no row has a label; name the labels with --label_file if that is intended")
    forms: dict[str, list[str]] = {}
    for label in labels:
        visible = "".join(x for x in normalize("NFKC", label) if category(x) != "Cf")
        forms.setdefault(visible.casefold(), []).append(label)
    if several := [repr(names)[1:-1] for names in forms.values() if len(names) > 1]:
        notes.append(f"labels that look alike are different labels: {'; '.join(several[:3])}")
    if own is not None and not arguments.label_file and set(own) == set(labels):
        return own
    if own is not None and not arguments.from_scratch:
        note_changed_classes(own, labels, notes)
    return labels


def label_ids(
    table: Table,
    labelled: Labelled,
    labels: list[str],
    ignore_unknown: bool | None,
    notes: list[str],
    source: str = "training data",
) -> Ragged:
    """Each row's label ids, ascending. `ignore_unknown`: --unknown_labels, None if it does not apply;
    `source`: of the list `labels`, for messages.

    Raises `InputError` with the lines of labels that are not in the list, and for texts that were split
    inside of a label. With `ignore_unknown` it drops unknown labels and notes their number.
    """
    mark = labelled.separator
    for label in (label for label in labels if mark and mark in label):
        if any({part.strip() for part in label.split(mark)}.issubset(names) for names in set(labelled.rows)):
            raise InputError(
                f"{table.path}: its texts are split at {mark!r}, which the label {label!r:.80} has; separate "
                "labels otherwise (--label_separator), or use a jsonl file with lists"
            )
    numbers = {name: number for number, name in enumerate(labels)}
    ids = {names: sorted(numbers[name] for name in names if name in numbers) for names in set(labelled.rows)}
    unknown: dict[str, list[int]] = {}  # label -> rows
    for row, names in enumerate(labelled.rows):
        for name in names:
            if name not in numbers:
                unknown.setdefault(name, []).append(row)
    if unknown and ignore_unknown:
        count = sum(map(len, unknown.values()))
        notes.append(
            f"{table.path}: {count} label(s) of {len(unknown)} kind(s) that the {source} does not "
            "have are ignored; references and scores are without them"
        )
    elif unknown and not any(ids.values()) and source.startswith(OF_MODEL):
        raise InputError(knows_none(table, next(iter(unknown)), source))
    elif unknown:
        instead = "leave out the row" if source.startswith(OF_MODEL) else "name it in --label_file"
        advice, problems = f"correct it, or {instead}", []
        if ignore_unknown is not None:
            advice = f"correct it, {instead}, or leave such labels out with --unknown_labels ignore"
        for name, rows in list(unknown.items())[:SHOWN]:
            repeated = (label for label in labels if label.startswith(f"{name} ("))  # which has its number
            near = nearest(name, labels) or next(repeated, None)
            hint = f"; did you mean {near!r}?" if near else ""
            where = f"{table.where(rows[0])}: label {name!r:.80}"
            problems.append(f"{where} is not in the {source} ({len(rows)} row(s)){hint}; {advice}")
        raise InputError(*problems, *more(len(unknown)))
    return Ragged.of([ids[names] for names in labelled.rows])


def knows_none(table: Table, label: str, source: str) -> str:
    """The problem of a file with labels that a model was not trained on, or of a command that only predicts
    with a model that is still to be trained."""
    return (
        f"{table.path}: none of its labels, such as {label!r:.80}, is in the {source}. This command does not "
        "train: add --do_train to train first, or name a model that was trained on these labels. (One that "
        "calls them LABEL_0, ... gets their names in id2label of its config.json)"
    )


def label_source(arguments: Any) -> str:
    """The source of a run's label list, for messages."""
    if not arguments.modes.train:
        return f"{OF_MODEL}{arguments.model_name_or_path}"
    if arguments.label_file is not None:
        return f"--label_file {arguments.label_file}"
    return "first buffer of the training data" if arguments.streaming else "training data"


def class_balanced(targets: Ragged, num_labels: int) -> np.ndarray:
    """(rows,) probability of each row if a label is drawn first, then one of its rows (Shen et al.,
    arXiv:1512.05830, section 3.2). "No label" counts as a label of its own, so that rows without labels are
    drawn, too."""
    count = np.bincount(targets.values, minlength=num_labels)
    weights = np.zeros(len(targets))
    np.add.at(weights, np.repeat(np.arange(len(targets)), targets.lengths), 1 / count[targets.values])
    unlabelled = targets.lengths == 0
    weights[unlabelled] = 1 / max(1, unlabelled.sum())
    return weights / weights.sum()
