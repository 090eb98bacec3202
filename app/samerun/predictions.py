"""Prediction files: their paths, what they may replace, and their formats. Rank 0 only."""

import contextlib
import csv
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from samerun import run_folder
from samerun.console import STDOUT, say
from samerun.data.files import FILE_KINDS
from samerun.errors import SHOWN_AS, TrainingError
from samerun.files import as_line, atomic_file, read_lines
from samerun.task import Predictions, Split, Task

WILDCARDS = re.compile(r"[-_.]*[*?\[\]]+")
DATA_SUFFIX = re.compile(rf"({'|'.join(map(re.escape, [*FILE_KINDS, '.txt']))})(\.gz)?$", re.IGNORECASE)
PREDICTED_FILES = "predicted_files"  # in metrics_NAME.json
SEPARATORS = {".csv": ",", ".tsv": "\t"}
UNWRITTEN = (".parquet", ".xlsx", ".gz", ".bz2", ".xz", ".zip")  # other kinds of data files


def path_of(arguments: Any) -> Path:
    """The path of this command's predictions: --predictions_file, or the default in the run's folder."""
    if arguments.predictions_file is not None:
        return Path(arguments.predictions_file)
    return Path(arguments.output_dir) / _beside_a_run(arguments, run_folder.PREDICTIONS)


class Likeliest(dict):
    """Values by name, of the likeliest of very many names: a table has them as JSON in one cell."""


def by_name(names: Iterable[str], values: Iterable[float], digits: int = 7) -> dict[str, float]:
    """The values of a line by name. Nine digits determine a number of fp32."""
    return {name: float(f"{value:.{digits}g}") for name, value in zip(names, values, strict=True)}


def metrics_name(arguments: Any) -> str:
    """The name of this command's metrics file in the run's folder."""
    return _beside_a_run(arguments, run_folder.METRICS)


def write_metrics(arguments: Any, metrics: dict[str, Any]) -> None:
    """Merges metrics into this command's metrics file, in place of all of an earlier command for the same
    split: those may be of other rows."""
    name, modes = metrics_name(arguments), arguments.modes
    own = {} if name == run_folder.METRICS else {PREDICTED_FILES: _predicted_files(arguments)}
    # A training has written some of its eval_* with the best model.
    replaced = ["eval_"] if modes.evaluate and not modes.train else []
    replaced += ["test_"] if modes.predict else []
    run_folder.merge_metrics(Path(arguments.output_dir), metrics | own, name, tuple(replaced))


def folder_of(arguments: Any) -> Path:
    """The folder, in the run's folder, for files that the predictions refer to, such as masks."""
    return Path(arguments.output_dir) / _beside_a_run(arguments, run_folder.MASKS)


def earlier_masks(arguments: Any) -> set[str]:
    """The names of the masks of the predictions that this command replaces; none if they are a table."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return {Path(line["mask"]).name for line in read_lines(path_of(arguments))}
    return set()


def _beside_a_run(arguments: Any, name: str) -> str:
    """`name`, or with a file's name appended if the command only predicts or evaluates that file in the
    folder of a finished run: it must not replace that run's own predictions and metrics, nor those of another
    file."""
    modes, folder = arguments.modes, Path(arguments.output_dir)
    holds_a_run = any((folder / name).exists() for name in (run_folder.BEST, run_folder.RUN_FILE))
    if modes.train or not holds_a_run:
        return name
    unnamed = "test" if modes.predict else "validation"
    first, *others = _files(arguments) or [unnamed]
    data = WILDCARDS.sub("", DATA_SUFFIX.sub("", Path(first).name)) or unnamed
    if others:
        data += f"_and_{len(others)}_more"
    stem, suffix = os.path.splitext(name)
    for ending in itertools.chain([data], (f"{data}_{number}" for number in itertools.count(2))):
        metrics = run_folder.read_if_whole(folder / f"metrics_{ending}.json")
        if metrics.get(PREDICTED_FILES) in (None, _predicted_files(arguments)):
            break
    return f"{stem}_{ending}{suffix}"


def _files(arguments: Any) -> tuple[str, ...]:
    """The files that a command predicts, or else evaluates."""
    return (arguments.test_file if arguments.modes.predict else arguments.validation_file) or ()


def _predicted_files(arguments: Any) -> list[str]:
    """The same as absolute paths. Temporary copies, whose paths change, have the names of messages."""
    return [SHOWN_AS.get(path) or os.path.realpath(path) for path in _files(arguments)]


def problem(path: Path, folder: Path) -> str | None:
    """Why predictions of the run in `folder` cannot be written to `path`; None if they can."""
    if str(path) in STDOUT:
        return None
    own = Path(os.path.realpath(folder))
    reserved = {*run_folder.OURS, run_folder.RECORDS, ".lock"} - {run_folder.PREDICTIONS}
    if any(Path(os.path.realpath(path)).is_relative_to(own / name) for name in reserved):
        return f"is reserved for other files of the run in {folder}; name another file"
    if path.suffix.lower() in UNWRITTEN:
        return "is no csv, tsv or jsonl file; end its name with one of these"
    try:
        path.lstat()
    except FileNotFoundError:
        writable = path.parent.is_dir() and os.access(path.parent, os.W_OK)
        return None if writable else f"folder {path.parent} does not exist or cannot be written"
    except OSError as error:  # such as a name that is too long
        return f"cannot be written ({error.strerror})"
    if path.is_file() and not path.is_symlink() and run_folder.has_record(folder, path):
        return None
    return f"exists and does not hold predictions of a run in {folder}; move it away, or name another file"


def write(
    path: Path,
    folder: Path,
    lines: Iterable[dict[str, Any]],
    list_separator: str,
    names: Sequence[str] = (),
) -> None:
    """Writes predictions as csv or tsv by the suffix, else as JSON lines; to standard output if the path is
    "-". `names`: the order of columns of a mapping. Raises `TrainingError` if a file that is not ours has
    appeared at `path`."""
    if str(path) in STDOUT:
        # `sys.stdout` drops what it cannot write. A reader that has what it wanted, as `| head`, is no error.
        with contextlib.suppress(BrokenPipeError), open(os.dup(1), "w", encoding="utf-8") as file:
            _write_lines(file, path, lines, list_separator, names)
    elif (why := problem(path, folder)) is not None:
        raise TrainingError(f"predictions: {path}: {why}")
    else:
        # Recorded before the file has its name: after a crash it must be known as ours.
        with atomic_file(path, partial(run_folder.record_predictions, folder)) as file:
            _write_lines(file, path, lines, list_separator, names)


def write_split(arguments: Any, task: Task, split: Split, predictions: Predictions) -> Path:
    """Writes the predictions of a split, one line per row, in the input's order. Returns the path."""
    path, ids = path_of(arguments), range(len(split)) if split.ids is None else split.ids
    lines = task.lines(predictions, split)
    numbered = ({"id": name, **line} for name, line in zip(ids, lines, strict=True))
    separator, usual = task.list_separator, getattr(arguments, "label_separator", task.list_separator)
    if separator != usual and path.suffix.lower() in SEPARATORS:
        say(f"note           {path}: a label has {usual!r} in it, so {separator!r} separates labels")
    write(path, Path(arguments.output_dir), numbered, separator, task.column_order)
    return path


def _write_lines(
    file: TextIO, path: Path, lines: Iterable[dict[str, Any]], list_separator: str, names: Sequence[str]
) -> None:
    """In a table a mapping becomes a column per key, and a list of texts is joined. Lines may have different
    keys: missing cells are empty."""
    separator = SEPARATORS.get(path.suffix.lower())
    if separator is None:
        file.writelines(map(as_line, lines))
        return
    columns: dict[str, None] = {}  # in the order in which they appear
    places = {name: place for place, name in enumerate(names)}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as rows:  # the header stands first, but is known last
        for line in lines:
            cells = dict(_cells(line, list_separator, places))
            columns |= dict.fromkeys(cells)
            rows.write(as_line(cells))
        rows.seek(0)
        writer = csv.DictWriter(file, list(columns), delimiter=separator, lineterminator="\n")
        if columns:
            writer.writeheader()
        writer.writerows(map(json.loads, rows))


def _cells(line: dict[str, Any], list_separator: str, places: dict[str, int]) -> Iterator[tuple[str, Any]]:
    for key, value in line.items():
        if isinstance(value, dict) and not isinstance(value, Likeliest):
            # A line may have its likeliest class first: another file's first line would have other columns.
            names = sorted(value, key=lambda name: places.get(name, len(places)))
            yield from ((f"{key}.{name}", value[name]) for name in names)
        elif isinstance(value, list) and all(isinstance(part, str) for part in value):
            yield key, list_separator.join(value)
        else:
            is_json = isinstance(value, list | dict)
            yield key, json.dumps(value, ensure_ascii=False) if is_json else value
