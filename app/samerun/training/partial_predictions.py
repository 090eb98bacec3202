"""Saves parts of a large file's predictions, so that an interruption costs a twentieth of them at most.

`PREDICTIONS_FILE.unfinished/` has a file for each part, in the order of the batches, and a description of the
prediction. It is removed once all predictions are written. Only rank 0 reads and writes it, so machines need
not share a disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samerun import signals
from samerun.arguments import OptimizationArguments, RunArguments
from samerun.batching.batches import EvalRows
from samerun.output import predictions as output
from samerun.output.files import write_json
from samerun.output.run_folder import BEST
from samerun.output.versions import code_version, library_versions
from samerun.parsing import as_dict, names_of
from samerun.reading.fingerprint import sample_of
from samerun.runtime import Run

PARTS = 20
SECONDS = 2.0  # minimum between two parts: short predictions are not saved
MOST_BYTES = 4 * 2**30  # of all predictions; masks may be larger
DESCRIPTION = "predictions_of.json"


class Part(NamedTuple):
    """Predictions of some rows."""

    rows: np.ndarray  # (n,) row numbers in the file
    arrays: dict[str, np.ndarray]  # (n, ...) each, of `Task.predict`


class PartialPredictions:
    """The saved parts of an interrupted prediction, to resume from and to add to. All processes must call the
    methods."""

    def __init__(
        self, run: Run, folder: Path, describe: Callable[[], dict[str, Any]], rows: EvalRows
    ) -> None:
        """`describe`: returns all that the predictions depend on, for JSON; called on rank 0."""
        self._run, self._folder, self._total_rows = run, folder, len(rows)
        self._total_batches = rows.num_batches(run.launch.world_size)
        self._batches_per_part = -(-self._total_batches // PARTS)
        self._enabled = True
        self.parts: list[Part] = []  # on rank 0
        self.num_batches, notes = run.on_main(partial(self._open, describe))  # of each process, in `parts`
        run.print(*(f"note           {note}" for note in notes))
        self._saved_at = time.perf_counter()

    @property
    def num_rows(self) -> int:
        """The number of rows in `parts`."""
        return sum(len(part.rows) for part in self.parts)

    def is_due(self, num_batches: int) -> bool:
        """Whether a part is due after this number of batches."""
        ends_part = (
            self._enabled and num_batches % self._batches_per_part == 0 and num_batches < self._total_batches
        )
        return ends_part and self._run.any(time.perf_counter() - self._saved_at > SECONDS)

    def save(self, num_batches: int, part: Part | None) -> None:
        """Saves the predictions since the last part; `part`: None except on rank 0. After a failure, as on a
        full disk, the prediction continues without saving."""
        problem = self._run.on_main(partial(self._save, num_batches, part))
        if problem is not None:
            self._enabled = False
            self._run.print(
                f"note           {self._folder}: {problem}; an interrupted prediction cannot be "
                "resumed from here"
            )
        self._saved_at = time.perf_counter()

    def remove(self) -> None:
        """Removes the parts, once all predictions are written."""
        self._run.on_main(partial(_remove, self._folder))
        signals.set_stop_message(signals.NOTHING_TO_SAVE)

    # Rank 0

    def _open(self, describe: Callable[[], dict[str, Any]]) -> tuple[int, list[str]]:
        """Reads the parts of an earlier start. Returns (number of batches, notes)."""
        self._description = json.loads(json.dumps(describe(), default=str))
        if not (self._folder / DESCRIPTION).is_file():
            return 0, []
        differences = _differences(self._folder / DESCRIPTION, self._description)
        if differences:
            _remove(self._folder)
            return 0, [
                f"{self._folder} is of another prediction (changed: {', '.join(differences)}); starting again"
            ]
        num_batches = 0
        for path in sorted(self._folder.glob("*.npz")):
            first, last = map(int, path.stem.split("-"))
            if first != num_batches:
                break
            try:
                with np.load(path) as file:
                    self.parts.append(
                        Part(file["rows"], {name[1:]: file[name] for name in file.files if name != "rows"})
                    )
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                break
            num_batches = last
        notes = (
            [f"{self.num_rows} of {self._total_rows} rows are predicted already ({self._folder})"]
            if num_batches
            else []
        )
        return num_batches, notes

    def _save(self, num_batches: int, part: Part) -> str | None:
        """Writes a part; returns an error message or None."""
        self.parts.append(part)
        expected = sum(values.nbytes for values in part.arrays.values()) / len(part.rows) * self._total_rows
        if expected > MOST_BYTES:
            return f"predictions of {expected / 2**30:.0f} GB are too large to save in parts"
        path = self._folder / f"{self.num_batches:09}-{num_batches:09}.npz"
        try:
            self._folder.mkdir(exist_ok=True)
            if not (self._folder / DESCRIPTION).is_file():
                write_json(self._folder / DESCRIPTION, self._description)
            unfinished = path.with_suffix(".unfinished")
            with unfinished.open("wb") as file:
                np.savez(file, rows=part.rows, **{f"_{name}": values for name, values in part.arrays.items()})
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError as error:
            return f"cannot be written ({error.strerror})"
        self.num_batches = num_batches
        signals.set_stop_message(f"the same command goes on after {self.num_rows} of {self._total_rows} rows")
        return None


def open_partial_predictions(
    run: Run, arguments: Any, fingerprint: dict[str, Any], rows: EvalRows
) -> PartialPredictions | None:
    """Opens the saved parts of this command's test predictions. Returns None if the predictions go to no
    regular file, or the rows have no content hash. `fingerprint`: `Data.fingerprint`."""
    path = output.path_of(arguments)
    if rows.split.content is None or not output.is_regular_file(path):
        return None
    describe = partial(_describe, run, arguments, fingerprint, rows)
    return PartialPredictions(run, path.with_name(f"{path.name}.unfinished"), describe, rows)


def _describe(run: Run, arguments: Any, fingerprint: dict[str, Any], rows: EvalRows) -> dict[str, Any]:
    """All that predictions depend on, by names for messages. The model's files are part of it; paths, and the
    arguments of training, are not."""
    trained = arguments.modes.train
    model = Path(arguments.output_dir) / BEST if trained else Path(arguments.model_name_or_path)
    files = [path for path in sorted(model.iterdir()) if path.is_file()] if model.is_dir() else []
    ignored = {
        field.name for group in (RunArguments, OptimizationArguments) for field in dataclasses.fields(group)
    }
    names = set(names_of(arguments, per_machine=False, reads=False)) - ignored
    return {
        **{f"--{name}": value for name, value in as_dict(arguments).items() if name in names},
        "the model": {path.name: sample_of(path) for path in files},
        "the data": fingerprint,
        "the rows": [len(rows), rows.split.content()],
        "the batches": [rows.batch_size, rows.max_tokens],
        "the number of processes": run.launch.world_size,
        "device and precision": [run.device.type, run.launch.precision],
        "the code": code_version(),
        "libraries": library_versions(),
    }


def _differences(path: Path, expected: dict[str, Any]) -> list[str]:
    """Names of the entries in which the description in `path` differs."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return [name for name in {**saved, **expected} if expected.get(name) != saved.get(name)]
    except (OSError, ValueError, AttributeError):
        return ["all"]


def _remove(folder: Path) -> None:
    """Removes our files, and the folder if it is empty then."""
    with contextlib.suppress(OSError):  # the folder may be missing or not empty
        for path in [*folder.glob("*.npz"), *folder.glob("*.unfinished"), folder / DESCRIPTION]:
            path.unlink(missing_ok=True)
        folder.rmdir()
