"""The run's folder: whether it may be used, and files that are whole or absent. Only rank 0 writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from finetune.errors import InputError, is_out_of_space

RUN_FILE = "run.json"
STATUS = "status.json"
CARD = "README.md"
BEST = "best"
OURS = (
    RUN_FILE,
    "history.jsonl",
    "metrics.json",
    "predictions.jsonl",
    CARD,
    BEST,
    "checkpoints",
    "tensorboard",
    STATUS,
)


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
        what = f"a link to {os.readlink(folder)!r}, which does not exist" if _dangles(folder) else "a file, not a folder"
        raise InputError(f"--output_dir {folder}: is {what}") from None
    except OSError as error:
        raise InputError(f"--output_dir {folder}: cannot be written ({error.strerror})") from None
    if training and overwrite and (folder / CARD).exists() and not (folder / RUN_FILE).exists():
        raise InputError(
            f"--output_dir {folder}: holds a {CARD} but no {RUN_FILE}, so it is no run's folder, and --overwrite_output_dir "
            "would remove what is not ours. Name another folder"
        )
    if not training or overwrite or resume:
        return
    if holds_a_run(folder):
        present = [name for name in OURS if (folder / name).exists()]
        raise InputError(
            f"--output_dir {folder} already holds a run ({', '.join(present)}); go on by --resume_from_checkpoint auto, "
            "replace it by --overwrite_output_dir, or name another folder"
        )


def _dangles(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


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
    of_a_start = (RUN_FILE, STATUS, "tensorboard", history.name)
    results = [name for name in OURS if name not in of_a_start and (folder / name).exists()]
    return bool(results) or (history.exists() and history.stat().st_size > 0)


def clear(folder: Path) -> None:
    """Removes what an earlier run left, and nothing else."""
    for name in OURS:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def lock(folder: Path) -> TextIO:
    """One run per folder: a lock that the kernel releases when its holder dies, however it dies. Keep the returned file open.

    Raises `InputError` naming the holder.
    """
    path = folder / ".lock"
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise InputError(f"--output_dir {folder} is in use by another run ({file.read().strip() or 'unknown'})") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    os.register_at_fork(after_in_child=file.close)  # a worker that outlives this process must not hold the lock for it
    return file


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file so that it is the old one or the new one, never half of it."""
    write_text(path, as_json(content))


def merge_metrics(folder: Path, metrics: dict[str, Any]) -> None:
    """Adds metrics to metrics.json; those that an earlier command made in the same folder and this one did not are kept."""
    path = folder / "metrics.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, {**earlier, **metrics})


def as_json(content: Any) -> str:
    """The text that `write_json` writes."""
    return json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """As `write_json`, for a text or its pieces."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with naming(path):
            with unfinished.open("w", encoding="utf-8") as file:
                file.writelines([text] if isinstance(text, str) else text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Has an error of writing name the file: the system does so when it is opened only, other languages' libraries never."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and (error.filename is None or is_out_of_space(error)):
            error.filename = str(path)
        raise
    except Exception as error:
        if not is_out_of_space(error):
            raise
        too_large = os.strerror(errno.EFBIG) in str(error)
        code = errno.EFBIG if too_large else errno.ENOSPC
        raise OSError(code, os.strerror(code), str(path)) from error


def replace_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write a folder beside `path`, flushes it to disk and renames it into place.

    A crash leaves the old folder, the new one, or (between the two renames) neither under its name but the old one beside it,
    which `recover_folder` puts back.
    """
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
    flush(unfinished)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(unfinished, path)
    _flush_one(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(path: Path) -> None:
    """Puts back what a crash inside `replace_folder` left under its other name."""
    old = path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        os.rename(old, path)


def file_record(path: Path) -> dict[str, Any]:
    """A file's size and hash, as manifests hold them."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def flush(place: Path) -> None:
    """Forces a file, or a folder and everything below it, to disk."""
    for path in [*place.rglob("*"), place]:
        _flush_one(path)


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
