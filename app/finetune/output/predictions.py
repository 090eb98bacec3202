"""Where predictions and a test file's metrics go, and in which format. Rank 0 only."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import TrainingError
from finetune.output import written
from finetune.output.files import write_text
from finetune.output.run_folder import METRICS, OURS, PREDICTIONS, check_present, holds_trained_run

# Opened anew, a standard output that is a file would lose what it holds.
DESCRIPTOR = re.compile(r"/dev/(stdout|stderr)|(?:/dev|/proc/self)/fd/(\d+)")
PATTERN = re.compile(r"[-_.]*[*?\[\]]+")  # what makes a name one of several files
DATA_SUFFIX = re.compile(r"\.(csv|tsv|txt|json|jsonl|parquet)(\.gz)?$", re.IGNORECASE)
SEPARATORS = {".csv": ",", ".tsv": "\t"}


def path_of(arguments: Any) -> Path:
    """Where this command's predictions go: --predictions_file, or the default in the run's folder."""
    if arguments.predictions_file is not None:
        return Path(arguments.predictions_file)
    return Path(arguments.output_dir) / _beside_a_run(arguments, PREDICTIONS)


def metrics_name(arguments: Any) -> str:
    """The file of this command's metrics in the run's folder."""
    return _beside_a_run(arguments, METRICS)


def folder_of(arguments: Any) -> Path:
    """The folder for files that this command's predictions name, such as masks: in the run's folder, wherever the lines go."""
    return Path(arguments.output_dir) / _beside_a_run(arguments, Path(PREDICTIONS).stem)


def _beside_a_run(arguments: Any, name: str) -> str:
    """A command that predicts in a finished run's folder leaves that run's predictions and metrics alone."""
    if arguments.modes.train or not arguments.modes.predict or not holds_trained_run(Path(arguments.output_dir)):
        return name
    stem, suffix = os.path.splitext(name)
    named = arguments.test_file or "test"
    first, others = (named, 0) if isinstance(named, str) else (named[0], len(named) - 1)
    data = PATTERN.sub("", DATA_SUFFIX.sub("", Path(first).name)) or "test"
    return f"{stem}_{data}{f'_and_{others}_more' if others else ''}{suffix}"


def problem(path: Path, folder: Path, replaced: bool) -> str | None:
    """Why predictions of the run in `folder` cannot be written to `path`, or None. `replaced`: whether the run that is there
    is removed before."""
    if _descriptor(path) is not None:
        return None if os.path.exists(path) else "is not open"
    place, base = Path(os.path.realpath(path.parent)) / path.name, Path(os.path.realpath(folder))
    own = [base / name for name in (*OURS, written.LIST, ".lock") if name != PREDICTIONS]
    if any(place.is_relative_to(name) for name in own):
        return f"is a place for other files of the run in {folder}; name another"
    try:
        if path.is_symlink():
            return "is a link; name the file itself"
    except OSError as error:  # a name that is too long
        return f"cannot be written ({error.strerror})"
    if path.is_dir():
        return "is a folder; name a file in it"
    if _is_device(path):
        return None if os.access(path, os.W_OK) else "cannot be written"
    if not path.exists():
        writable = path.parent.is_dir() and os.access(path.parent, os.W_OK)
        return None if writable else f"folder {path.parent} does not exist or cannot be written"
    if (replaced and place == base / PREDICTIONS) or (path.is_file() and written.is_predictions(folder, path)):
        return None
    return f"would be replaced, but does not hold predictions of a run in {folder}; move it away, or name another"


def is_file_to_be(path: Path) -> bool:
    """Whether predictions that go there make a file, which a pipe, a device and an open descriptor do not."""
    return _descriptor(path) is None and not _is_device(path)


def write(path: Path, folder: Path, lines: Iterable[dict[str, Any]], list_separator: str) -> Path:
    """Writes predictions, as csv if the name ends so, else as JSON lines. Returns the path: another one, if something that is
    not ours has come to lie at `path`. Raises `TrainingError` for a device or pipe that fails."""
    separator = SEPARATORS.get(path.suffix.lower())
    texts = map(as_line, lines) if separator is None else as_table(lines, separator, list_separator)
    descriptor = _descriptor(path)
    if is_file_to_be(path):
        check_present(path)
        free, number = path, 1
        while problem(free, folder, False) is not None and os.path.lexists(free):
            number += 1
            free = path.with_name(f"{path.stem}_{number}{path.suffix}")
        write_text(free, texts, before=lambda content: written.add_predictions(folder, free, content))
        return free
    try:
        opened = os.fdopen(os.dup(descriptor), "w", encoding="utf-8") if descriptor else path.open("w", encoding="utf-8")
        with opened as file:
            file.writelines(texts)
    except OSError as error:
        raise TrainingError(f"--predictions_file {path}: cannot be written ({error.strerror})") from error
    return path


def as_line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


def as_table(lines: Iterable[dict[str, Any]], separator: str, list_separator: str) -> Iterator[str]:
    """The lines of a csv file. A mapping gets a column per key; a list of texts is joined."""
    text, writer = io.StringIO(), None
    for line in lines:
        cells = _cells(line, list_separator)
        if writer is None:
            writer = csv.DictWriter(text, cells, delimiter=separator, lineterminator="\n")
            writer.writeheader()
        writer.writerow(cells)
        yield text.getvalue()
        text.seek(0)
        text.truncate()


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
