"""The run's folder: the names of its files, what may be replaced in it, its metrics, status and versions.
Rank 0 only.

A folder is a training run's if it holds a `run.json` of ours. Then the names below are the run's, but for
files that the lists in its folders do not name (see `files`), a README.md that is no model card, and
predictions that were changed. Those, and everything under other names, are the user's and never removed.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from samerun.errors import InputError, TrainingError
from samerun.files import as_json, file_record, files_at, foreign_files, remove_folder, write_json, write_text

# Of the files that schemas/ describes. To be raised when readers of the files could fail or be misled; a new
# key is no reason.
SCHEMA_VERSION = 1
RUN_FILE = "run.json"
STATUS = "status.json"
HISTORY, SPEED = "history.jsonl", "speed.jsonl"
TRACKERS = "trackers.json"  # the run's ids at tracking services
CARD = "README.md"
REPORT = "report.html"
METRICS = "metrics.json"
PREDICTIONS = "predictions.jsonl"
LINES = (HISTORY, PREDICTIONS)  # files of lines with a schema; run.json has their versions
MASKS = "predictions"  # a folder: files that predictions.jsonl refers to
BEST_PREDICTIONS = "validation_predictions.npz"  # of the best model
BEST = "best"
CHECKPOINTS = "checkpoints"
PLOTS = "plots"
TENSORBOARD = "tensorboard"
PROFILE = "profile"
# A variable: our launching scripts count lost processes there; a checkpoint removes it.
LOSSES = "SAMERUN_LOSSES"
START_FILES = (STATUS, HISTORY, SPEED, TRACKERS, TENSORBOARD, PROFILE)  # a failed start may leave them
# run.json is the last that is removed: it says that the others are a run's.
OURS = (
    *(METRICS, PREDICTIONS, MASKS, CARD, REPORT, BEST_PREDICTIONS, BEST),
    *(CHECKPOINTS, PLOTS),
    *(*START_FILES, RUN_FILE),
)
# Sentence of every model card.
CARD_MARK = "Data that differ from the training data were not tried and may give worse results."
METRIC_NAMES = ("eval_", "test_", "train_", "best_")
# In metrics.json, besides scores. Version 1.0.0 wrote all but the first.
OF_A_BEST_MODEL = ("best_metric", "exported", "averaged_steps", "average_metric")
RECORDS = ".predictions"  # hashes of the predictions that commands with this folder have written
LIBRARY_FILES = {
    TENSORBOARD: re.compile(r".*(events\.out\.tfevents\.[^/]*|/\d[^/]*/hparams\.yml)"),
    PROFILE: re.compile(r".*/trace\.json"),
}
MAX_LISTED = 3
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "numpy")
PACKAGE = Path(__file__).resolve().parent


# What is whose


def read_if_whole(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} without one that can be read."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def holds_training_run(folder: Path) -> bool:
    """Whether a training has begun in a folder."""
    return "fingerprint" in read_if_whole(folder / RUN_FILE)


def foreign(folder: Path, name: str) -> list[Path]:
    """The files at or below `folder`/`name` that no run has written. `name`: one of `OURS`, or of a command
    that only predicts."""
    path = folder / name
    if name in LIBRARY_FILES and holds_training_run(folder):
        return [file for file in files_at(path) if not LIBRARY_FILES[name].fullmatch(file.as_posix())]
    if path.is_symlink() or not path.is_file():
        return foreign_files(path)
    if name == CARD:
        is_own = CARD_MARK in path.read_text(encoding="utf-8", errors="replace")
    elif name == PREDICTIONS:
        is_own = has_record(folder, path)
    elif name.startswith(Path(METRICS).stem):
        is_own = any(metric.startswith(METRIC_NAMES) for metric in read_metrics(path))
    else:
        is_own = holds_training_run(folder)
    return [] if is_own else [path]


def check_foreign(folder: Path, names: Iterable[str]) -> None:
    """Raises `InputError` naming files at or below `folder`/NAME that no run has written."""
    found = [path.relative_to(folder).as_posix() for name in names for path in foreign(folder, name)]
    if found:
        more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
        raise InputError(
            f"--output_dir {folder}: {', '.join(found[:MAX_LISTED])}{more} would be replaced, but no run "
            "is known to have written it; move it away, or name another folder"
        )


def remove(folder: Path, names: Iterable[str]) -> None:
    """Removes what runs have written at or below `folder`/NAME."""
    for name in names:
        remove_folder(folder / name, kept=foreign(folder, name))


def clear(folder: Path) -> None:
    """Removes the files of earlier runs, and no others."""
    remove(folder, OURS)


def record_predictions(folder: Path, path: Path) -> None:
    """Remembers the content of a file as predictions that a command with this folder has written."""
    status.check_place()
    records = folder / RECORDS
    known = records.read_text(encoding="utf-8").split() if records.exists() else []
    write_text(records, "".join(f"{each}\n" for each in sorted({*known, file_record(path)["sha256"]})))


def has_record(folder: Path, path: Path) -> bool:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file_record(path)["sha256"] in (folder / RECORDS).read_text(encoding="utf-8").split()
    return False


# Before a run


def check_output_dir(folder: Path, training: bool, overwrite: bool, resume: bool) -> None:
    """Creates a missing folder. Raises `InputError` if the folder cannot be written, or if another run's
    files would be lost. Deletes nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except FileExistsError:
        raise InputError(f"--output_dir {folder}: is a file or a link to nowhere, not a folder") from None
    except OSError as error:
        raise InputError(f"--output_dir {folder}: cannot be written ({error.strerror})") from None
    if not training:
        return
    # Without a checkpoint the run starts anew.
    if not resume or not any((folder / CHECKPOINTS).glob("step_*")):
        check_foreign(folder, OURS)
    if not overwrite and not resume and holds_a_run(folder):
        present = [name for name in reversed(OURS) if (folder / name).exists()]
        raise InputError(
            f"--output_dir {folder} already holds a run ({', '.join(present)}); resume it by "
            "--resume_from_checkpoint auto, replace it by --overwrite_output_dir, or name another folder"
        )


def was_restarted(folder: Path) -> bool:
    """Whether torchrun has restarted this job after a failure (--max_restarts), or Slurm has requeued it, and
    the run in `folder` is this job's own. Such a job resumes from its newest checkpoint, whatever its
    arguments."""
    restarts = {
        "launcher_process": ("TORCHELASTIC_RESTART_COUNT", os.getppid()),
        "slurm_job": ("SLURM_RESTART_COUNT", os.environ.get("SLURM_JOB_ID")),
    }
    before = read_if_whole(folder / RUN_FILE)
    counted = {key: own for key, (count, own) in restarts.items() if (os.environ.get(count) or "0") != "0"}
    return any(own is not None and before.get(key) == own for key, own in counted.items())


def holds_a_run(folder: Path) -> bool:
    """Whether a folder holds results of a run. Files of a failed start do not count."""
    history = folder / HISTORY
    results = [name for name in OURS if name not in (*START_FILES, RUN_FILE) and (folder / name).exists()]
    return bool(results) or (history.exists() and history.stat().st_size > 0)


# Metrics


def merge_metrics(
    folder: Path, metrics: dict[str, Any], name: str = METRICS, replaced: tuple[str, ...] = ()
) -> None:
    """Merges metrics into a metrics file. Other metrics in it, from earlier commands, stay, but for those
    with the prefixes `replaced`."""
    status.check_place()
    path = folder / name
    kept = {key: value for key, value in read_metrics(path).items() if not key.startswith(replaced)}
    write_json(path, {**kept, **metrics, "schema_version": SCHEMA_VERSION})


def begin_best(folder: Path, step: int) -> None:
    """Writes that the best model is from now on that of `step`. Removes the metrics and predictions of
    another one.

    Call it before the export: a resumed run must know that best/ may be of this step.
    """
    metrics = read_metrics(folder / METRICS)
    if metrics.get("best_step") not in (None, step):
        remove(folder, (PREDICTIONS, MASKS, BEST_PREDICTIONS))
        kept = [name for name in metrics if not name.startswith(("eval_", "test_"))]
        metrics = {name: metrics[name] for name in kept if name not in OF_A_BEST_MODEL}
    write_json(folder / METRICS, {**metrics, "best_step": step, "schema_version": SCHEMA_VERSION})


def read_metrics(path: Path) -> dict[str, Any]:
    """The metrics of a file, {} if it does not exist. Raises `InputError` for a file that holds something
    else."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())}); move it away") from None
    if not isinstance(metrics, dict):
        raise InputError(f"{path}: holds no metrics; move it away")
    return metrics


def by_split(metrics: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The metrics eval_* and test_*, by split and without their prefixes, and as "baseline" those of the
    baseline on the test rows, or else on the validation rows, with its "split"."""

    def under(prefix: str) -> dict[str, Any]:
        names = [name for name in metrics if name.startswith(prefix)]
        return {name.removeprefix(prefix): metrics[name] for name in names}

    splits = {"validation": under("eval_"), "test": under("test_")}
    split = "test" if under("test_baseline_") else "validation"
    scores = under("test_baseline_") or under("eval_baseline_")
    return splits | {"baseline": {**scores, "split": split} if scores else {}}


# Status


class Status:
    """status.json: the state of a training run ("running", "done", "stopped", "failed").

    A launcher's exit code is not enough: torchrun turns every code but 0 into 1, and a killed deepspeed
    launcher returns 0.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the checkpoint and signal threads write it too
        self.path: Path | None = None  # None: this process writes no training run's status
        self.state: tuple[str, str | None] = "running", None  # and its reason
        self.step, self.micro_batch_parts = 0, 1

    def begin(self, folder: Path, step: int) -> None:
        """Writes that the run in `folder`, which this process has locked, starts from `step`."""
        self.path, self.step, self.micro_batch_parts = folder / STATUS, step, 1
        self.places = [os.stat(place) for place in (folder, folder / ".lock") if place.exists()]
        self._write(("running", None))

    def check_place(self) -> None:
        """Raises `TrainingError` if the run's folder was moved or removed: another run may use its place."""
        if self.path is None or self._is_in_place():
            return
        folder, self.path = self.path.parent, None
        raise TrainingError(
            f"--output_dir {folder} was moved or removed while the run was writing to it. Put it back, and "
            "run the same command with --resume_from_checkpoint auto"
        )

    def _is_in_place(self) -> bool:
        folder = self.path.parent
        with contextlib.suppress(OSError):
            # On some file systems the inodes of folders change, so the lock is compared too.
            now = [os.stat(place) for place in (folder, folder / ".lock") if place.exists()]
            return any(map(os.path.samestat, self.places, now))
        return False

    def saved(self, step: int) -> None:
        """Writes the step of the newest checkpoint. The state stays as it is: a checkpoint may be written
        while the run is `failing`."""
        self.step = step
        self._write_if_possible()

    def cut_micro_batches(self, parts: int) -> None:
        """Writes into how many parts each micro-batch is now cut, because it did not fit into memory."""
        self.micro_batch_parts = parts
        self.saved(self.step)

    def failing(self, reason: str) -> None:
        """Writes a first reason of a failure. `end` may replace it, if this process lives that long."""
        self._write_if_possible(("failed", reason))

    def end(self, state: str, reason: str | None = None) -> None:
        """Writes "done", "stopped" or "failed". Does nothing before `begin` or after another `end`."""
        self._write_if_possible((state, reason))
        self.path = None

    def _write(self, state: tuple[str, str | None] | None = None) -> None:
        """Overwrites the file in place if the disk has no room for a new one. Writes nothing where the run's
        folder was moved away: that may be another run's status."""
        with self._lock:
            self.state = state or self.state
            if self.path is None or not self._is_in_place():
                return
            try:
                write_json(self.path, self._content())
            except OSError:
                with self.path.open("r+", encoding="utf-8") as file:
                    file.write(as_json(self._content()))
                    file.truncate()

    def _write_if_possible(self, state: tuple[str, str | None] | None = None) -> None:
        """Ignores a disk that is full or gone: that may be why the run ends."""
        with contextlib.suppress(OSError):
            self._write(state)

    def _content(self) -> dict[str, Any]:
        state, reason = self.state
        return {
            "schema_version": SCHEMA_VERSION,
            "state": state,
            "step": self.step,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "reason": reason,
            "micro_batch_parts": self.micro_batch_parts,
        }


status = Status()


# Versions, for run.json and the comparison of machines


def library_versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that influence a run's numbers; None for a library that is not
    installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def code_version() -> dict[str, str]:
    """A short hash of each source file: the package `samerun` and the started script."""
    script = Path(sys.argv[0]).resolve()
    files = {f"app/samerun/{path.relative_to(PACKAGE).as_posix()}": path for path in PACKAGE.rglob("*.py")}
    if script.suffix == ".py" and script.is_file() and script not in files.values():
        files[f"app/{script.name}" if script.parent == PACKAGE.parent else script.name] = script
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for name, path in sorted(files.items())}
