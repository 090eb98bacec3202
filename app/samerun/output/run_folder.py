"""The run's folder: its file names, checks, lock, metrics, and the atomic replacement of folders in it. Rank
0 only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from samerun.errors import InputError, TrainingError
from samerun.output import written
from samerun.output.files import flush, flush_one, path_in_errors, write_json

RUN_FILE = "run.json"
STATUS = "status.json"
CARD = "README.md"
REPORT = "report.html"
BEST_PREDICTIONS = "validation_predictions.npz"  # of the best model
BEST = "best"
BEST_MODELS = "best_models"  # --keep_best
CHECKPOINTS = "checkpoints"
METRICS = "metrics.json"
PREDICTIONS = "predictions.jsonl"
PLOTS = "plots"
# In metrics.json, besides scores. Version 1.0.0 wrote all but the first.
OF_A_BEST_MODEL = ("best_metric", "exported", "averaged_steps", "average_metric")
TRACKERS = "trackers.json"  # the run's ids at tracking services
OURS = (
    RUN_FILE,
    "history.jsonl",
    "speed.jsonl",
    TRACKERS,
    METRICS,
    PREDICTIONS,
    "predictions",  # files that predictions.jsonl refers to
    CARD,
    REPORT,
    BEST_PREDICTIONS,
    "bootstrap_validation.npz",  # of version 1.0.0, as the next and kept_weights
    "bootstrap_test.npz",
    BEST,
    BEST_MODELS,
    "kept_weights",
    CHECKPOINTS,
    PLOTS,
    "tensorboard",
    "profile",
    STATUS,
)
LOCK_CONTENT = re.compile(r"(process \d+ on .*)?")
_held: tuple[Path, TextIO, os.stat_result] | None = (
    None  # the locked folder, its open lock file, and the folder's stat
)


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
    for path in (
        folder / name for name in (RUN_FILE, "history.jsonl", "speed.jsonl", TRACKERS, METRICS, STATUS)
    ):
        if path.exists() and not (path.is_file() and os.access(path, os.R_OK)):
            raise InputError(f"--output_dir {folder}: {path.name} is not a readable file; move it away")
    if not resume or not any(
        (folder / CHECKPOINTS).glob("step_*")
    ):  # without a checkpoint the run starts anew
        written.check_foreign(folder, OURS)
    if overwrite or resume:
        return
    if holds_a_run(folder):
        present = [name for name in OURS if (folder / name).exists()]
        raise InputError(
            f"--output_dir {folder} already holds a run ({', '.join(present)}); resume it by "
            "--resume_from_checkpoint auto, "
            "replace it by --overwrite_output_dir, or name another folder"
        )


def was_restarted(folder: Path) -> bool:
    """Whether torchrun has restarted this job after a failure (--max_restarts), or Slurm has requeued it, and
    the run in `folder` is this job's own. Such a job resumes from its newest checkpoint, whatever its
    arguments."""
    restarts = {
        "launcher_process": ("TORCHELASTIC_RESTART_COUNT", os.getppid()),
        "slurm_job": ("SLURM_RESTART_COUNT", os.environ.get("SLURM_JOB_ID")),
    }
    with contextlib.suppress(OSError, ValueError):
        before = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        return any(
            int(os.environ.get(count) or 0) > 0 and own is not None and before.get(key) == own
            for key, (count, own) in restarts.items()
        )
    return False


def holds_a_run(folder: Path) -> bool:
    """Whether a folder holds results of a run. Files of a failed start do not count."""
    history = folder / "history.jsonl"
    start_files = (RUN_FILE, STATUS, "tensorboard", TRACKERS, history.name, "speed.jsonl")
    results = [name for name in OURS if name not in start_files and (folder / name).exists()]
    return bool(results) or (history.exists() and history.stat().st_size > 0)


def clear(folder: Path) -> None:
    """Removes the files of earlier runs, and no others."""
    for name in OURS:
        written.remove(folder, folder / name)


def lock(folder: Path) -> TextIO:
    """Locks a folder, so that only one run uses it. Keep the returned file open. The kernel releases the lock
    when this process ends, even if it is killed.

    Raises `InputError` naming the holder, or for a `.lock` that is not a run's.
    """
    global _held
    path = folder / ".lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        what = "is a link" if error.errno == errno.ELOOP else f"cannot be opened ({error.strerror})"
        raise InputError(f"--output_dir {folder}: its file .lock {what}; remove it") from None
    file = os.fdopen(descriptor, "r+", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"--output_dir {folder} is in use by another run ({file.read().strip() or 'unknown'})"
        ) from None
    if not LOCK_CONTENT.fullmatch(file.read(300)):
        raise InputError(f"--output_dir {folder}: its file .lock is not a run's; move it away")
    file.seek(0)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    os.register_at_fork(
        after_in_child=file.close
    )  # a worker that outlives this process must not keep the lock
    _held = (folder, file, os.stat(folder))
    return file


def check_present(path: Path) -> None:
    """Raises `TrainingError` if `path` is in the run's folder and that folder was moved or removed."""
    if not is_present(path):
        raise TrainingError(
            f"--output_dir {_held[0]} was moved or removed while the run was writing to it. Put it "
            "back, and run the same "
            "command with --resume_from_checkpoint auto"
        )


def is_present(path: Path) -> bool:
    """False if `path` is in the folder that this process has locked and that folder was moved or removed.

    Compares the lock file too: on some file systems the inodes of folders change.
    """
    if _held is None or _held[1].closed or not path.is_relative_to(_held[0]):
        return True
    folder, file, locked = _held
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(os.stat(folder), locked):
            return True
        return os.path.samestat(os.stat(folder / ".lock"), os.fstat(file.fileno()))
    return False


def holds_trained_run(folder: Path) -> bool:
    """Whether a folder holds a training run. Commands that do not train must keep its files."""
    return (folder / BEST).is_dir() or (folder / RUN_FILE).exists()


def merge_metrics(folder: Path, metrics: dict[str, Any], name: str = METRICS) -> None:
    """Merges metrics into a metrics file. Other metrics in it, from earlier commands, stay."""
    path = folder / name
    check_present(path)
    written.add(folder, path)
    write_json(path, {**read_metrics(path), **metrics})


def begin_best(folder: Path, step: int) -> None:
    """Writes that the best model is from now on that of `step`. Removes the metrics and predictions of
    another one.

    Call it before the export: a resumed run must know that best/ may be of this step.
    """
    path = folder / METRICS
    metrics = read_metrics(path)
    if metrics.get("best_step") not in (None, step):
        check_present(path)
        for name in (PREDICTIONS, "predictions", BEST_PREDICTIONS):
            written.remove(folder, folder / name)
        metrics = {
            name: value
            for name, value in metrics.items()
            if not name.startswith(("eval_", "test_")) and name not in OF_A_BEST_MODEL
        }
    written.add(folder, path)
    write_json(path, {**metrics, "best_step": step})


def read_metrics(path: Path) -> dict[str, Any]:
    """The metrics of a file, {} if it does not exist. Raises `InputError` for a file that holds something
    else."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())}); move it away") from None
    if not isinstance(metrics, dict):
        raise InputError(f"{path}: holds no metrics; move it away")
    return metrics


def replace_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write a temporary folder, flushes it to disk and renames it to `path`.

    A crash leaves the old folder or the new one. Between the two renames the old one has a temporary name;
    `recover_folder` renames it back.
    """
    check_present(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with path_in_errors(path):
            fill(unfinished)
            put_in_place(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def put_in_place(unfinished: Path, path: Path) -> None:
    """The second half of `replace_folder`, for a folder that is already filled."""
    old = path.with_name(f".{path.name}.old")
    check_present(path)
    written.keep_foreign(path, unfinished)
    _apply_umask(unfinished)
    flush(unfinished)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(unfinished, path)
    flush_one(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _apply_umask(folder: Path) -> None:
    """Gives files of mode 600 the mode of the umask: safetensors makes its files readable by the owner
    only."""
    mode = folder.stat().st_mode & 0o666  # mkdir has applied the umask
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600 != mode:
            with contextlib.suppress(OSError):
                path.chmod(mode)


def recover_folder(path: Path) -> None:
    """Renames the old folder back after a crash inside `replace_folder`."""
    old = path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        os.rename(old, path)
