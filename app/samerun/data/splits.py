"""Reads the rows of a split from one file, several files, or a data set of `datasets`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from samerun.console import Phase
from samerun.data.cache import cache_folder, content_hash, content_key
from samerun.data.files import common_classes, matching
from samerun.data.tables import FILE, Source, Table, dataset_table, read_table, split_off
from samerun.errors import InputError, collecting, in_short, listed, raise_problems
from samerun.parsing import is_given

if TYPE_CHECKING:
    import datasets

T = TypeVar("T")
LIMIT_ARGUMENTS = {
    "train": "max_train_samples",
    "validation": "max_eval_samples",
    "test": "max_predict_samples",
}


def read_split(
    arguments: Any, split: str, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Table | None:
    """Reads "train", "validation" or "test" from its files or from --dataset_name; None if neither is given.
    Raises `InputError` with the problems of all files."""
    patterns = getattr(arguments, f"{split}_file")
    if patterns is not None:
        argument = f"--{split}_file"
        read = partial(read_table, encoding=arguments.encoding, required=required, optional=optional)
        table = _read_each(argument, expand_patterns(argument, patterns), read, _concatenated)
    elif arguments.dataset_name is not None:
        table = _dataset_split(arguments, split, required, optional)
    else:
        return None
    return limited(table, arguments, split)


def limited(rows: T | None, arguments: Any, split: str) -> T | None:
    """The rows without those beyond --max_train_samples and the like."""
    limit = getattr(arguments, LIMIT_ARGUMENTS[split])
    return rows if rows is None or limit is None or limit >= len(rows) else rows.take(np.arange(limit))


def read_needed(
    arguments: Any,
    modes: Sequence[bool],
    read: Callable[[str], T | None],
    notes: list[str],
    *,
    unit: str,
    elsewhere: str,
) -> dict[str, T]:
    """The splits that a run needs. `modes`: whether it trains, evaluates and predicts. `read`: split ->
    its rows, which have `take(rows)` and `labels_of(row)`; None if the arguments name no
    source. Validation rows are split off the training rows if there are no others. `unit`: what a row is, in
    the plural; `elsewhere`: where a split may come from besides its own argument. Raises `InputError` with
    all problems."""
    trains, evaluates, predicts = modes
    splits, problems = {}, []
    for split, needed in zip(LIMIT_ARGUMENTS, modes, strict=True):
        with collecting(problems):
            rows = read(split) if needed else None
            if rows is not None:
                splits[split] = rows
            elif needed and (split != "validation" or not trains):
                problems.append(f"no {split} {unit}: give --{split}_file{elsewhere}")
    if problems:
        raise InputError(*problems)
    if trains and evaluates and "validation" not in splits:
        drawn = split_off(splits["train"], arguments.validation_split, arguments.seed)
        train, held_out = _with_all_labels(splits["train"], *drawn)
        splits |= {"train": splits["train"].take(train), "validation": splits["train"].take(held_out)}
        several = ", drawn from all training files" if len(arguments.train_file or ()) > 1 else ""
        notes.append(f"{len(held_out)} training {unit} are kept for validation (--validation_split{several})")
    elif is_given(arguments, "validation_split"):
        notes.append("--validation_split is not used: no validation rows are taken from training rows")
    if arguments.test_file is not None and not predicts:
        notes.append(f"--test_file {' '.join(arguments.test_file)} is not read: --do_predict is not given")
    own = [getattr(arguments, f"{split}_file") for split in splits]
    if arguments.train_file is not None and not trains and all(own):  # else it may be a folder with others
        notes.append(f"--train_file {' '.join(arguments.train_file)} is not read: --do_train is not given")
    return splits


def _with_all_labels(rows: Any, train: np.ndarray, held_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(training rows, validation rows) of which the first have every label: a label's first row is moved to
    them if all its rows were drawn for validation. Raises `InputError` if no validation row is left."""
    seen, moved = set(chain.from_iterable(map(rows.labels_of, train.tolist()))), []
    for row in held_out.tolist():
        if not seen.issuperset(rows.labels_of(row)):
            seen.update(rows.labels_of(row))
            moved.append(row)
    if len(moved) == len(held_out):
        raise InputError(
            f"{rows.path}: --validation_split draws only rows that training needs, as no other row has their "
            "labels; give --validation_file"
        )
    moved = np.array(moved, dtype=int)
    return np.union1d(train, moved), np.setdiff1d(held_out, moved)


def read_sources(
    arguments: Any,
    split: str,
    read: Callable[[str, bool, str | None], T | None],
    join: Callable[[str, Sequence[tuple[T, int]]], T],
) -> T | None:
    """The rows of a split in the files and folders of its own argument or, without that, in the folders of
    --train_file; None if there are none.

    `read`: (a path; whether it is of the split's own argument; the common parent of several folders, to which
    the names of their rows are relative, None for one) -> its rows, None without the split. `join`: of
    `_read_each`. Raises `InputError` with the problems of all paths."""
    own = getattr(arguments, f"{split}_file")
    argument, patterns = (f"--{split}_file", own) if own else ("--train_file", arguments.train_file)
    paths = [] if patterns is None else expand_patterns(argument, patterns)
    folders = [path for path, _ in paths if os.path.isdir(path)]
    if own is None:
        paths = [(path, number) for path, number in paths if path in folders]
    base = os.path.commonpath(map(os.path.abspath, folders)) if len(folders) > 1 else None
    return _read_each(argument, paths, lambda path: read(path, own is not None, base), join)


def _read_each(
    argument: str,
    paths: Sequence[tuple[str, int]],
    read: Callable[[str], T | None],
    join: Callable[[str, Sequence[tuple[T, int]]], T],
) -> T | None:
    """What `read` returns for the paths (`expand_patterns`) of an argument; None if there is nothing. `join`:
    (argument, several results with the index of their pattern) -> one."""
    if len(paths) == 1:
        return read(paths[0][0])
    parts, problems = [], []
    for path, number in paths:
        with collecting(problems):
            part = read(path)
            if part is not None:
                parts.append((part, number))
    raise_problems(problems)
    return join(argument, parts) if len(parts) > 1 else next((part for part, _ in parts), None)


def expand_patterns(argument: str, patterns: Sequence[str]) -> list[tuple[str, int]]:
    """Expands the patterns of an argument to (file or folder, index of its pattern); sorted within a pattern.
    Raises `InputError` for a pattern without files, and for files that are named twice."""
    expanded = {pattern: matching(pattern) for pattern in patterns}
    files = [(path, number) for number, pattern in enumerate(patterns) for path in expanded[pattern]]
    duplicates = [path for path, count in Counter(str(Path(path)) for path, _ in files).items() if count > 1]
    unmatched = [pattern for pattern, paths in expanded.items() if not paths]
    problems = [f"{argument} {pattern}: no file matches this pattern" for pattern in unmatched]
    problems += [
        f"{argument}: {path} is named twice, so its rows would count twice; name it once"
        for path in duplicates
    ]
    raise_problems(problems)
    return files


def joined_fields(argument: str, numbered: Sequence[tuple[Any, int]]) -> dict[str, Any]:
    """`path`, `source` and `sources` of the rows of several sources, `numbered` by the index of their
    pattern. Raises `InputError` if only some sources of the argument have labels (`labelled`)."""
    parts, numbers = zip(*numbered, strict=True)
    having, lacking = ([part.path for part in parts if part.labelled is wanted] for wanted in (True, False))
    if having and lacking:
        raise InputError(
            f"{argument}: {having[0]} has labels, but {lacking[0]} has none; give all of them labels, or none"
        )
    return {
        "path": f"{parts[0].path} and {len(parts) - 1} more",
        "source": np.repeat(numbers, [len(part) for part in parts]),
        "sources": tuple(parts[numbers.index(number)].path for number in dict.fromkeys(numbers)),
    }


def _concatenated(argument: str, numbered: Sequence[tuple[Table, int]]) -> Table:
    """One table of several files. Raises `InputError` if their columns differ."""
    import datasets

    tables, problems = [table for table, _ in numbered], []
    for name in dict.fromkeys(name for table in tables for name in table.names):
        having = [table.path for table in tables if name in table.names]
        lacking = [table.path for table in tables if name not in table.names]
        if lacking:
            problems.append(
                f"{argument}: the files have different columns: {name!r} is in {listed(having)}, "
                f"but not in {listed(lacking)}; give all of them the same columns"
            )
    raise_problems(problems)
    columns = tables[0].rows.column_names
    parts = [table.rows for table in tables]
    in_order = [part if part.column_names == columns else part.select_columns(columns) for part in parts]
    rows = datasets.concatenate_datasets(in_order)
    number = np.repeat(np.arange(len(tables), dtype=np.int32), list(map(len, tables)))
    return Table(
        path=f"{tables[0].path} and {len(tables) - 1} more",
        kind=tables[0].kind,
        rows=rows.add_column(FILE, number),
        classes=common_classes([table.classes for table in tables]),
        sources=tuple(Source(table.path, table.kind, number) for table, number in numbered),
    )


def _dataset_split(
    arguments: Any, split: str, required: tuple[str, ...], optional: tuple[str, ...]
) -> Table | None:
    import datasets

    name = arguments.dataset_splits.get(split)
    if arguments.streaming:  # `load_dataset` would download all splits
        rows = load_from(arguments, split, partial(_read_stream, name or split))
    elif name is None and Path(arguments.dataset_name, "state.json").is_file():  # by Dataset.save_to_disk
        if split != "train":
            return None
        rows = datasets.load_from_disk(arguments.dataset_name)
    else:
        rows = load_from(arguments, split, partial(datasets.load_dataset, split=name))
        if name is None:  # `rows` has all splits
            if split not in rows:
                return None
            rows = rows[split]
    name = name or split
    check_columns(rows, f"dataset {arguments.dataset_name}, split {name}", required)
    return dataset_table(rows, f"{arguments.dataset_name} ({name})", required, optional)


def open_stream(split: str, *name: str | None, **version: Any) -> tuple[datasets.IterableDataset, str]:
    """Returns (a split of a data set, whose rows are read lazily; a hash of the data set's version)."""
    import datasets

    builder = datasets.load_dataset_builder(*name, **version)
    return builder.as_streaming_dataset(split=split), str(builder.hash)


def _read_stream(split: str, *name: str | None, **version: Any) -> datasets.Dataset:
    import datasets

    rows, _ = open_stream(split, *name, **version)
    return datasets.Dataset.from_list(list(rows), features=rows.features)


def load_from(arguments: Any, split: str, load: Callable[..., Any]) -> Any:
    """Calls `load` with --dataset_name, its configuration and its revision. `split`: for the message of the
    `InputError` if loading fails."""
    import datasets

    datasets.disable_progress_bars()  # they would also appear in log files
    name, config, revision = parts_of(arguments.dataset_name)
    if revision and Path(name).is_dir():
        raise InputError(f"--dataset_name: {name} is a folder, which has no revisions; leave @{revision} out")
    cache_dir, files = arguments.cache_dir, local_files(name)
    if files and not arguments.streaming:  # `datasets` knows local files by their times of modification alone
        content = content_key(map(content_hash, files))[:40]
        cache_dir = (cache_folder("datasets") if cache_dir is None else Path(cache_dir)) / content
    try:
        with Phase(f"reading {name}"):
            return load(name, config, revision=revision, cache_dir=cache_dir and str(cache_dir))
    except Exception as error:
        is_split_error = split in arguments.dataset_splits and isinstance(error, ValueError | AssertionError)
        what = f"--dataset_split {arguments.dataset_split} of " if is_split_error else ""
        what += f"--dataset_name {arguments.dataset_name}"
        raise InputError(f"{what}: cannot be loaded ({in_short(error)})") from error


def parts_of(name: str) -> tuple[str, str | None, str | None]:
    """(name, configuration, revision) of NAME:CONFIG@REVISION. A folder's name may have these signs."""
    if Path(name).exists():
        return name, None, None
    name, _, revision = name.partition("@")
    name, _, config = name.partition(":")
    return name, config or None, revision or None


def local_files(name: str) -> list[Path]:
    """The files of a data set, sorted; [] if it is none of this machine."""
    return sorted(path for path in Path(name).rglob("*") if path.is_file())


def check_columns(rows: datasets.Dataset, what: str, required: Sequence[str]) -> None:
    """Raises `InputError` for missing columns. `what`: the name of the rows in the message."""
    missing = [column for column in required if column not in rows.column_names]
    names = ", ".join(rows.column_names)
    raise_problems([f"{what}: has no column {column!r}; it has {names}" for column in missing])
