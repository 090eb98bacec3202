"""The run's folder: whether it may be used, and files that are whole or absent. Only rank 0 writes."""

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

from finetune.errors import InputError, TrainingError
from finetune.output import written
from finetune.output.files import flush, flush_one, naming, write_json

RUN_FILE = "run.json"
STATUS = "status.json"
CARD = "README.md"
REPORT = "report.html"
BOOTSTRAP = "bootstrap_{}.npz"  # of the validation and of the test rows
BEST_PREDICTIONS = "validation_predictions.npz"  # the best model's
BEST = "best"
BEST_MODELS, KEPT_WEIGHTS = "best_models", "kept_weights"  # of --keep_best and --average_checkpoints
CHECKPOINTS = "checkpoints"
METRICS = "metrics.json"
PREDICTIONS = "predictions.jsonl"
PICTURES = "pictures"
TRACKERS = "trackers.json"  # which runs of tracking services this one is
OURS = (
    RUN_FILE,
    "history.jsonl",
    "speed.jsonl",
    TRACKERS,
    METRICS,
    PREDICTIONS,
    "predictions",  # files that it names
    CARD,
    REPORT,
    BEST_PREDICTIONS,
    BOOTSTRAP.format("validation"),
    BOOTSTRAP.format("test"),
    BEST,
    BEST_MODELS,
    KEPT_WEIGHTS,
    CHECKPOINTS,
    PICTURES,
    "tensorboard",
    "profile",
    STATUS,
)
# What the lock of a run holds.
HOLDER = re.compile(r"(process \d+ on .*)?")
_held: tuple[Path, TextIO, os.stat_result] | None = None  # the folder of this process's run, its lock, and what it was


def check_output_dir(folder: Path, training: bool, overwrite: bool, resume: bool) -> None:
    """Refuses a folder that cannot be written or that another run's files would be lost in; creates it if it is missing.

    Raises `InputError`; deletes nothing.
    """
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
    if not resume or not any((folder / CHECKPOINTS).glob("step_*")):  # nothing to go on from: the run begins anew
        written.check_foreign(folder, OURS)
    if overwrite or resume:
        return
    if holds_a_run(folder):
        present = [name for name in OURS if (folder / name).exists()]
        raise InputError(
            f"--output_dir {folder} already holds a run ({', '.join(present)}); go on by --resume_from_checkpoint auto, "
            "replace it by --overwrite_output_dir, or name another folder"
        )


def was_restarted(folder: Path) -> bool:
    """Whether torchrun restarts this job after a failure (--max_restarts), and the run in `folder` is this job's own: then it
    resumes, whatever the arguments say about other runs."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return False
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["launcher_process"] == os.getppid()
    return False


def holds_a_run(folder: Path) -> bool:
    """Whether a new run would destroy anything in a folder; what a failed start leaves does not count."""
    history = folder / "history.jsonl"
    of_a_start = (RUN_FILE, STATUS, "tensorboard", TRACKERS, history.name, "speed.jsonl")
    results = [name for name in OURS if name not in of_a_start and (folder / name).exists()]
    return bool(results) or (history.exists() and history.stat().st_size > 0)


def clear(folder: Path) -> None:
    """Removes what earlier runs have written, and nothing else."""
    for name in OURS:
        written.remove(folder, folder / name)


def lock(folder: Path) -> TextIO:
    """One run per folder: a lock that the kernel releases when its holder dies, however it dies. Keep the returned file open.

    Raises `InputError` naming the holder, or for a `.lock` that is not a run's.
    """
    global _held
    path = folder / ".lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        what = "is a link" if error.errno == errno.ELOOP else f"cannot be opened ({error.strerror})"
        raise InputError(f"--output_dir {folder}: .lock in it {what}; remove it") from None
    file = os.fdopen(descriptor, "r+", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"--output_dir {folder} is in use by another run ({file.read().strip() or 'unknown'})") from None
    if not HOLDER.fullmatch(file.read(300)):
        raise InputError(f"--output_dir {folder}: .lock in it is not a run's; move it away")
    file.seek(0)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    os.register_at_fork(after_in_child=file.close)  # a worker that outlives this process must not hold the lock for it
    _held = (folder, file, os.stat(folder))
    return file


def check_present(path: Path) -> None:
    """Raises `TrainingError` if `path` is in the folder that this process has locked and that was moved or removed."""
    if not is_present(path):
        raise TrainingError(
            f"--output_dir {_held[0]} was moved or removed while the run was writing to it. Put it back, and run the same "
            "command with --resume_from_checkpoint auto"
        )


def is_present(path: Path) -> bool:
    """Whether `path` is not in this process's folder, or that is where it was when it was locked.

    Compares the lock too, since inodes of folders change on some file systems.
    """
    if _held is None or _held[1].closed or not path.is_relative_to(_held[0]):
        return True
    folder, file, known = _held
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(os.stat(folder), known):
            return True
        return os.path.samestat(os.stat(folder / ".lock"), os.fstat(file.fileno()))
    return False


def holds_trained_run(folder: Path) -> bool:
    """Whether a folder has the results of a training, which commands that do not train must keep."""
    return (folder / BEST).is_dir() or (folder / RUN_FILE).exists()


def merge_metrics(folder: Path, metrics: dict[str, Any], name: str = METRICS) -> None:
    """Adds metrics to a file; those that an earlier command made in the same folder and this one did not are kept."""
    path = folder / name
    check_present(path)
    written.add(folder, path)
    write_json(path, {**read_metrics(path), **metrics})


def read_metrics(path: Path) -> dict[str, Any]:
    """The metrics of a file, {} without one. Raises `InputError` for a file that holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())}); move it away") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: holds no metrics; move it away")
    return found


def replace_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write a folder beside `path`, flushes it to disk and renames it into place.

    A crash leaves the old folder, the new one, or (between the two renames) neither under its name but the old one beside it,
    which `recover_folder` puts back.
    """
    check_present(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with naming(path):
            fill(unfinished)
            put_in_place(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def put_in_place(unfinished: Path, path: Path) -> None:
    """The second half of `replace_folder`, for a folder that others have filled."""
    old = path.with_name(f".{path.name}.old")
    check_present(path)
    written.keep_foreign(path, unfinished)
    _give_usual_modes(unfinished)
    flush(unfinished)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(unfinished, path)
    flush_one(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _give_usual_modes(folder: Path) -> None:
    """Gives files the mode that the umask gives: safetensors makes its own readable by the owner only."""
    mode = folder.stat().st_mode & 0o666  # mkdir's
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600 != mode:
            with contextlib.suppress(OSError):
                path.chmod(mode)


def recover_folder(path: Path) -> None:
    """Puts back what a crash inside `replace_folder` left under its other name."""
    old = path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        os.rename(old, path)
