"""The rows of a split: of one file, of several, or of a data set of `datasets`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.errors import InputError
from finetune.reading.columns import SHOWN, more, take
from finetune.reading.problems import listed
from finetune.reading.stored_rows import LINE, Column
from finetune.reading.tables import Source, Table, read_table
from finetune.reading.text_files import matching

if TYPE_CHECKING:
    import datasets

SPLITS = {"train": "dataset_split", "validation": "dataset_validation_split", "test": "dataset_test_split"}


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
    """The rows of "train", "validation" or "test", from its file or files or from --dataset_name; None when neither is given.

    Raises `InputError` for whatever is wrong with the files.
    """
    named = getattr(arguments, f"{split}_file")
    if named is not None:
        patterns = (named,) if isinstance(named, str) else named
        table = read_files(f"--{split}_file", patterns, arguments.encoding, required, optional)
    elif arguments.dataset_name is not None:
        table = _dataset_split(arguments, split, required, optional)
    else:
        return None
    limit = {"train": "max_train_samples", "validation": "max_eval_samples", "test": "max_predict_samples"}[split]
    most = getattr(arguments, limit)
    return table if table is None or most is None or most >= len(table) else take(table, np.arange(most))


def read_files(
    argument: str, patterns: Sequence[str], encoding: str, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> Table:
    """The rows of all the files that an argument names (`files_named`).

    Raises `InputError` for files that are wrong, each with its rows, and files of which some lack a column.
    """
    found, problems, tables = files_named(argument, patterns), [], []
    if len(found) == 1:
        return read_table(found[0][0], encoding, required, optional)
    for path, _ in found:
        try:
            tables.append(read_table(path, encoding, required, optional))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems[:SHOWN], *more(len(problems)))
    return _joined(argument, tables, [number for _, number in found])


def files_named(argument: str, patterns: Sequence[str]) -> list[tuple[str, int]]:
    """(file or folder, number of its name or pattern) of all that an argument names, in the order given; those of a pattern
    sorted. Raises `InputError` for a pattern without files, and a file that is named twice."""
    found = [(path, number) for number, pattern in enumerate(patterns) for path in matching(pattern)]
    none = [pattern for pattern in patterns if not matching(pattern)]
    twice = [path for path, count in Counter(str(Path(path)) for path, _ in found).items() if count > 1]
    problems = [f"{argument} {pattern}: no file matches this pattern" for pattern in none]
    problems += [f"{argument}: {path} is named twice, so its rows would count twice; name it once" for path in twice]
    if problems:
        raise InputError(*problems)
    return found


def above(paths: Sequence[str]) -> str | None:
    """The folder that all of several folders are in, from which their rows are named; None of one alone, whose rows need no
    more than their place in it."""
    return os.path.commonpath(map(os.path.abspath, paths)) if len(paths) > 1 else None


def check_alike(argument: str, labelled: Sequence[tuple[str, bool]]) -> None:
    """Raises `InputError` where only some of an argument's sources have labels, by (its path, whether it has)."""
    having, lacking = ([path for path, has in labelled if has is wanted] for wanted in (True, False))
    if having and lacking:
        raise InputError(f"{argument}: {having[0]} has labels, but {lacking[0]} has none; give all of them labels, or none")


def _joined(argument: str, tables: list[Table], numbers: list[int]) -> Table:
    """The rows of several files, one after the other. `numbers`: of the pattern that each belongs to. Raises `InputError` where
    some lack a column that others have."""
    names = list(dict.fromkeys(name for table in tables for name in table.columns))
    problems = []
    for name in names:
        having = [table.path for table in tables if name in table.columns]
        lacking = [table.path for table in tables if name not in table.columns]
        if lacking:
            problems.append(
                f"{argument}: the files have different columns: {name!r} is in {listed(having)}, but not in {listed(lacking)}; "
                "give all of them the same columns"
            )
    if problems:
        raise InputError(*problems)
    return Table(
        path=f"{tables[0].path} and {len(tables) - 1} more",
        kind=tables[0].kind,
        columns={name: Column.joined([table.columns[name] for table in tables]) for name in names},
        lines=Column.joined([table.lines for table in tables]),
        sources=tuple(Source(table.path, table.kind, number) for table, number in zip(tables, numbers, strict=True)),
        source=np.repeat(np.arange(len(tables), dtype=np.int32), [len(table) for table in tables]),
    )


def _dataset_split(arguments: Any, split: str, required: tuple[str, ...], optional: tuple[str, ...]) -> Table | None:
    import datasets

    wanted = getattr(arguments, SPLITS[split])
    # `load_dataset` brings all splits to the disk.
    load = partial(_read_stream, wanted or split) if arguments.streaming else partial(datasets.load_dataset, split=wanted)
    found = load_from(arguments, split, load)
    if arguments.streaming:
        wanted = wanted or split
    if wanted is None and split not in found:
        return None
    rows, shown = (found[split], split) if wanted is None else (found, wanted)
    check_columns(rows, f"dataset {arguments.dataset_name}, split {shown}", required)
    return table_of(rows, f"{arguments.dataset_name} ({shown})", required, optional)


def open_stream(split: str, *name: str | None, **version: Any) -> tuple[datasets.IterableDataset, str]:
    """(a split of a data set, of which nothing is read yet; a hash of its files' versions)."""
    import datasets

    builder = datasets.load_dataset_builder(*name, **version)
    return builder.as_streaming_dataset(split=split), str(builder.hash)


def _read_stream(split: str, *name: str | None, **version: Any) -> datasets.Dataset:
    import datasets

    rows, _ = open_stream(split, *name, **version)
    return datasets.Dataset.from_list(list(rows), features=rows.features)


def load_from(arguments: Any, split: str, load: Callable[..., Any]) -> Any:
    """What `load` gives for --dataset_name and the arguments that go with it. Raises `InputError` if it cannot be loaded."""
    name, argument = arguments.dataset_name, SPLITS[split]
    wanted = getattr(arguments, argument)
    if arguments.dataset_revision and Path(name).is_dir():
        raise InputError(f"--dataset_revision: {name} is a folder, which has no revisions; leave it out")
    given = {"revision": arguments.dataset_revision, "cache_dir": arguments.cache_dir}
    try:
        return load(name, arguments.dataset_config_name, **given)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        of_split = wanted is not None and isinstance(error, ValueError | AssertionError)
        what = f"--{argument} {wanted} of --dataset_name {name}" if of_split else f"--dataset_name {name}"
        raise InputError(f"{what}: cannot be loaded ({reason})") from error


def check_columns(rows: datasets.Dataset, what: str, required: Sequence[str]) -> None:
    """Raises `InputError` for required columns that rows of `datasets` lack. `what`: they, in words."""
    missing = [column for column in required if column not in rows.column_names]
    if missing:
        raise InputError(*(f"{what}: has no column {c!r}; it has {', '.join(rows.column_names)}" for c in missing))


def table_of(rows: datasets.Dataset, path: str, required: Sequence[str], optional: Sequence[str]) -> Table:
    """Rows of `datasets` as a table of these columns, which `check_columns` has found there."""
    import datasets

    columns = {c: _named(rows, c) for c in dict.fromkeys([*required, *optional]) if c in rows.column_names}
    columns = {c: column for c, column in columns.items() if c in required or not column.is_empty}
    lines = datasets.Dataset.from_dict({LINE: np.arange(1, len(rows) + 1)})
    classes = {c: names for c in columns if (names := class_names(rows.features[c])) is not None}
    # A dataset has rows, not lines; "parquet" is the kind whose places are row numbers.
    return Table(path, "parquet", columns, Column(lines, LINE), classes)


def _named(rows: datasets.Dataset, column: str) -> Column:
    """A column; numbers of a ClassLabel, also in lists, as their names."""
    feature, cells = rows.features[column], Column(rows, column)
    return cells if class_names(feature) is None else Column.of(cell_of(feature, cell) for cell in cells)


def cell_of(feature: Any, cell: Any) -> Any:
    """A cell of a column of this feature; numbers of a ClassLabel, also in lists, as their names."""
    names = class_names(feature)
    if names is None:
        return cell
    return cell and [_name(names, number) for number in cell] if isinstance(cell, list) else _name(names, cell)


def class_names(feature: Any) -> list[str] | None:
    """The names of a ClassLabel, or of a list of them; None for other features."""
    import datasets

    inner = feature if isinstance(feature, datasets.ClassLabel) else getattr(feature, "feature", None)
    return inner.names if isinstance(inner, datasets.ClassLabel) else None


def _name(names: list[str], number: int | None) -> str | None:
    """The name of a class; None for -1, which stands for rows without one."""
    return None if number is None or number < 0 else names[number]
