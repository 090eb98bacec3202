"""Paths and formats of prediction files, and the name of the metrics file. Rank 0 only."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from samerun.errors import TrainingError
from samerun.output import written
from samerun.output.files import write_text
from samerun.output.run_folder import METRICS, OURS, PREDICTIONS, check_present, holds_trained_run

# Written through the open descriptor: opening such a path again would truncate a file behind it.
DESCRIPTOR = re.compile(r"/dev/(stdout|stderr)|(?:/dev|/proc/self)/fd/(\d+)")
WILDCARDS = re.compile(r"[-_.]*[*?\[\]]+")
DATA_SUFFIX = re.compile(r"\.(csv|tsv|txt|json|jsonl|parquet)(\.gz)?$", re.IGNORECASE)
SEPARATORS = {".csv": ",", ".tsv": "\t"}
UNWRITTEN = (".parquet", ".xlsx", ".gz", ".bz2", ".xz", ".zip")  # other kinds of data files


def path_of(arguments: Any) -> Path:
    """The path of this command's predictions: --predictions_file, or the default in the run's folder."""
    if arguments.predictions_file is not None:
        return Path(arguments.predictions_file)
    return Path(arguments.output_dir) / _beside_a_run(arguments, PREDICTIONS)


def metrics_name(arguments: Any) -> str:
    """The name of this command's metrics file in the run's folder."""
    return _beside_a_run(arguments, METRICS)


def folder_of(arguments: Any) -> Path:
    """The folder, in the run's folder, for files that the predictions refer to, such as masks."""
    return Path(arguments.output_dir) / _beside_a_run(arguments, Path(PREDICTIONS).stem)


def _beside_a_run(arguments: Any, name: str) -> str:
    """`name`, or with the test file's name appended if the command only predicts in the folder of a finished
    run: it must not replace that run's own predictions and metrics."""
    if (
        arguments.modes.train
        or not arguments.modes.predict
        or not holds_trained_run(Path(arguments.output_dir))
    ):
        return name
    stem, suffix = os.path.splitext(name)
    test_file = arguments.test_file or "test"
    first, others = (test_file, 0) if isinstance(test_file, str) else (test_file[0], len(test_file) - 1)
    data = WILDCARDS.sub("", DATA_SUFFIX.sub("", Path(first).name)) or "test"
    return f"{stem}_{data}{f'_and_{others}_more' if others else ''}{suffix}"


def problem(path: Path, folder: Path, replaced: bool) -> str | None:
    """Why predictions of the run in `folder` cannot be written to `path`; None if they can. `replaced`:
    whether the command removes the run in `folder` first."""
    if _descriptor(path) is not None:
        return None if os.path.exists(path) else "is not open"
    target, run_folder = Path(os.path.realpath(path.parent)) / path.name, Path(os.path.realpath(folder))
    reserved = [run_folder / name for name in (*OURS, written.LIST, ".lock") if name != PREDICTIONS]
    if any(target.is_relative_to(name) for name in reserved):
        return f"is reserved for other files of the run in {folder}; name another file"
    try:
        if path.is_symlink():
            return "is a link; name the file itself"
    except OSError as error:  # such as a name that is too long
        return f"cannot be written ({error.strerror})"
    if path.is_dir():
        return "is a folder; name a file in it"
    if path.suffix.lower() in UNWRITTEN:
        return "is no csv, tsv or jsonl file; end its name with one of these"
    if _is_device(path):
        return None if os.access(path, os.W_OK) else "cannot be written"
    if not path.exists():
        writable = path.parent.is_dir() and os.access(path.parent, os.W_OK)
        return None if writable else f"folder {path.parent} does not exist or cannot be written"
    if (replaced and target == run_folder / PREDICTIONS) or (
        path.is_file() and written.is_predictions(folder, path)
    ):
        return None
    return f"exists and does not hold predictions of a run in {folder}; move it away, or name another file"


def is_regular_file(path: Path) -> bool:
    """Whether writing to the path makes a regular file: False for pipes, devices and open descriptors."""
    return _descriptor(path) is None and not _is_device(path)


def write(path: Path, folder: Path, lines: Iterable[dict[str, Any]], list_separator: str) -> Path:
    """Writes predictions as csv or tsv by the suffix, else as JSON lines. Returns the path, which has a
    number added if a file that is not ours has appeared at `path`. Raises `TrainingError` for a device or
    pipe that fails."""
    separator = SEPARATORS.get(path.suffix.lower())
    texts = map(as_line, lines) if separator is None else as_table(lines, separator, list_separator)
    descriptor = _descriptor(path)
    if is_regular_file(path):
        check_present(path)
        free, number = path, 1
        while problem(free, folder, False) is not None and os.path.lexists(free):
            number += 1
            free = path.with_name(f"{path.stem}_{number}{path.suffix}")
        write_text(free, texts, before=lambda content: written.add_predictions(folder, free, content))
        return free
    try:
        opened = (
            os.fdopen(os.dup(descriptor), "w", encoding="utf-8")
            if descriptor
            else path.open("w", encoding="utf-8")
        )
        with opened as file:
            file.writelines(texts)
    except BrokenPipeError:
        pass  # the reader has what it wanted, as in `| head`
    except OSError as error:
        raise TrainingError(f"--predictions_file {path}: cannot be written ({error.strerror})") from error
    return path


def as_line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


def as_table(lines: Iterable[dict[str, Any]], separator: str, list_separator: str) -> Iterator[str]:
    """Yields the lines of a csv file. A mapping becomes a column per key; a list of texts is joined.

    Lines may have different keys, such as the likeliest of many classes. Missing cells are empty.
    """
    columns: dict[str, None] = {}  # in the order in which they appear
    number = 0
    with tempfile.TemporaryFile() as rows:  # the header stands first, but is known last
        for line in lines:
            cells = _cells(line, list_separator)
            columns |= dict.fromkeys(cells)
            pickle.dump(
                (_table_row([cells.get(column) for column in columns], separator), len(columns)), rows
            )
            number += 1
        rows.seek(0)
        if columns:
            yield f"{_table_row(columns, separator)}\n"
        for _ in range(number):
            row, width = pickle.load(rows)
            yield f"{row}{separator * (len(columns) - width)}\n"


def _table_row(cells: Iterable[Any], separator: str) -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=separator, lineterminator="").writerow(cells)
    return text.getvalue()


def _cells(line: dict[str, Any], list_separator: str) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for key, value in line.items():
        if isinstance(value, dict):
            cells |= {f"{key}.{name}": part for name, part in value.items()}
        elif isinstance(value, list) and all(isinstance(part, str) for part in value):
            cells[key] = list_separator.join(value)
        else:
            cells[key] = as_line(value).rstrip("\n") if isinstance(value, list) else value
    return cells


def _descriptor(path: Path) -> int | None:
    match = DESCRIPTOR.fullmatch(str(path))
    return None if match is None else {"stdout": 1, "stderr": 2}.get(match[1]) or int(match[2])


def _is_device(path: Path) -> bool:
    return path.is_char_device() or path.is_fifo()
