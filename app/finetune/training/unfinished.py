"""Predictions that are kept while a large file is predicted: an interruption costs a twentieth of them, not all.

`PREDICTIONS_FILE.unfinished/` has a file for each part, in the order of the batches, and what they are predictions of. It is
removed when the predictions are written. Rank 0 alone reads and writes it, so machines need not share a disk.
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

from finetune.arguments.groups import OptimizationArguments, RunArguments
from finetune.arguments.parsing import as_dict, names_of
from finetune.batching.batches import EvalRows
from finetune.launching import signals
from finetune.launching.processes import Run
from finetune.output import predictions as output
from finetune.output.files import write_json
from finetune.output.run_folder import BEST
from finetune.output.versions import code_version, library_versions
from finetune.reading.fingerprint import sample_of

PARTS = 20
SECONDS = 2.0  # between two parts at least: a file that is predicted within seconds is not worth it
MOST_BYTES = 4 * 2**30  # of all predictions: masks may be larger
OF_WHAT = "predictions_of.json"


class Part(NamedTuple):
    """`Task.predict`'s arrays, (rows, ...), of rows that have these numbers in their file."""

    rows: np.ndarray
    arrays: dict[str, np.ndarray]


class Unfinished:
    """What earlier starts of the same prediction have kept, and what this one keeps. `rounds`: how many batches of each process
    are done; `parts`: their predictions, on rank 0. All processes must call the methods."""

    def __init__(self, run: Run, folder: Path, describe: Callable[[], dict[str, Any]], rows: EvalRows) -> None:
        """`describe`: what the predictions depend on, for JSON; called on rank 0."""
        self._run, self._folder, self._num_rows = run, folder, len(rows)
        self._total = rows.num_batches(run.launch.world_size)
        self._every = -(-self._total // PARTS)
        self._works = True
        self.parts: list[Part] = []
        self.rounds, notes = run.on_main(partial(self._open, describe))
        run.print(*(f"note           {note}" for note in notes))
        self._kept_at = time.perf_counter()

    @property
    def num_kept(self) -> int:
        """Rows that `parts` has."""
        return sum(len(part.rows) for part in self.parts)

    def is_due(self, rounds: int) -> bool:
        """Whether what was predicted since the last part is to be kept, after so many batches."""
        ends_part = self._works and rounds % self._every == 0 and rounds < self._total
        return ends_part and self._run.any(time.perf_counter() - self._kept_at > SECONDS)

    def keep(self, rounds: int, part: Part | None) -> None:
        """Keeps what was predicted since the last part; `part`: on rank 0. A disk that has no room for it is no reason to stop
        predicting."""
        problem = self._run.on_main(partial(self._keep, rounds, part))
        if problem is not None:
            self._works = False
            self._run.print(f"note           {self._folder}: {problem}; if this is interrupted, it cannot go on from here")
        self._kept_at = time.perf_counter()

    def remove(self) -> None:
        """The predictions are written."""
        self._run.on_main(partial(_remove, self._folder))
        signals.says_at_stop(signals.NOTHING_TO_SAVE)

    # Rank 0

    def _open(self, describe: Callable[[], dict[str, Any]]) -> tuple[int, list[str]]:
        """(rounds that are done, notes)"""
        self._of = json.loads(json.dumps(describe(), default=str))
        if not (self._folder / OF_WHAT).is_file():
            return 0, []
        differing = _differences(self._folder / OF_WHAT, self._of)
        if differing:
            _remove(self._folder)
            return 0, [f"{self._folder} was of another prediction (changed: {', '.join(differing)}); this one begins anew"]
        rounds = 0
        for path in sorted(self._folder.glob("*.npz")):
            first, last = map(int, path.stem.split("-"))
            if first != rounds:
                break
            try:
                with np.load(path) as file:
                    self.parts.append(Part(file["rows"], {name[1:]: file[name] for name in file.files if name != "rows"}))
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                break
            rounds = last
        self.rounds = rounds
        return rounds, [f"{self.num_kept} of {self._num_rows} rows are predicted already ({self._folder})"] if rounds else []

    def _keep(self, rounds: int, part: Part) -> str | None:
        """What is wrong with it, or None."""
        self.parts.append(part)
        expected = sum(values.nbytes for values in part.arrays.values()) / len(part.rows) * self._num_rows
        if expected > MOST_BYTES:
            return f"all predictions take {expected / 2**30:.0f} GB, which are not kept before they are complete"
        path = self._folder / f"{self.rounds:09}-{rounds:09}.npz"
        try:
            self._folder.mkdir(exist_ok=True)
            if not (self._folder / OF_WHAT).is_file():
                write_json(self._folder / OF_WHAT, self._of)
            unfinished = path.with_suffix(".unfinished")
            with unfinished.open("wb") as file:
                np.savez(file, rows=part.rows, **{f"_{name}": values for name, values in part.arrays.items()})
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError as error:
            return f"cannot be written ({error.strerror})"
        self.rounds = rounds
        signals.says_at_stop(f"the same command goes on after {self.num_kept} of {self._num_rows} rows")
        return None


def unfinished_predictions(run: Run, arguments: Any, fingerprint: dict[str, Any], rows: EvalRows) -> Unfinished | None:
    """What is kept of this command's predictions of a test file; None if they go to no file, or nothing tells whether the rows
    are the same. `fingerprint`: the task's, `Data.fingerprint`."""
    path = output.path_of(arguments)
    if rows.split.content is None or not output.is_file_to_be(path):
        return None
    describe = partial(_describe, run, arguments, fingerprint, rows)
    return Unfinished(run, path.with_name(f"{path.name}.unfinished"), describe, rows)


def _describe(run: Run, arguments: Any, fingerprint: dict[str, Any], rows: EvalRows) -> dict[str, Any]:
    """All that predictions depend on, by what a message calls it. Where files lie and how a model was trained is no part of
    it, but the files of the model are."""
    trained = arguments.modes.train
    model = Path(arguments.output_dir) / BEST if trained else Path(arguments.model_name_or_path)
    files = [path for path in sorted(model.iterdir()) if path.is_file()] if model.is_dir() else []
    others = {field.name for group in (RunArguments, OptimizationArguments) for field in dataclasses.fields(group)}
    names = set(names_of(arguments, per_machine=False, reads=False)) - others
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


def _differences(path: Path, wanted: dict[str, Any]) -> list[str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [name for name in {**found, **wanted} if wanted.get(name) != found.get(name)]
    except (OSError, ValueError, AttributeError):
        return ["all"]


def _remove(folder: Path) -> None:
    """Removes what `Unfinished` wrote, and the folder if that leaves it empty."""
    with contextlib.suppress(OSError):  # it is not there, or not empty then
        for path in [*folder.glob("*.npz"), *folder.glob("*.unfinished"), folder / OF_WHAT]:
            path.unlink(missing_ok=True)
        folder.rmdir()
