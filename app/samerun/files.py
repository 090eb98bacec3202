"""Files that a crash leaves whole: atomic writes, folders that are replaced as a whole, and a folder's lock;
and a thread that writes files while training continues.

A folder that a run fills (best/, a checkpoint, plots/) has a list of its files, `LIST`. All other files in it
are the user's: they are never removed.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from samerun.errors import InputError, is_out_of_space

LIST = ".files.json"
ROWS = "rows_"  # begins the names of temporary folders with rows from Python
# Folders that a crash of `replace_folder`, or of a copy for other machines, leaves.
UNFINISHED = re.compile(r"\.(step_\d+|best)\.(.*unfinished|old|of_rank_0_for_\d+)")
LOCK_CONTENT = re.compile(r"(process \d+ on .*)?")
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def shipped(name: str) -> Path:
    """The folder accelerate_configs/ or ds_configs/: an installation has it in the package, a checkout at its
    top. A copy of app/ alone has none."""
    package = Path(__file__).resolve().parent
    return package / name if (package / name).is_dir() else package.parents[1] / name


# Single files


@contextlib.contextmanager
def atomic_file(path: Path, finished: Callable[[Path], None] | None = None) -> Iterator[TextIO]:
    """Opens a temporary text file that replaces `path` if the block succeeds. A crash leaves the old file or
    the new one. `finished`: called with the complete temporary file before it gets its name."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        with path_in_errors(path):
            with unfinished.open("x", encoding="utf-8", newline="") as file:  # "x": follows no link
                yield file
                file.flush()
                os.fsync(file.fileno())
            if finished is not None:
                finished(unfinished)
            os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Writes a text, or the pieces of one, atomically."""
    with atomic_file(path) as file:
        file.writelines([text] if isinstance(text, str) else text)


def write_json(path: Path, content: Any) -> None:
    write_text(path, as_json(content))


def as_json(content: Any) -> str:
    """The text that `write_json` writes."""
    return json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def as_line(content: Any, default: Callable[[Any], Any] | None = None) -> str:
    """A line of a file of JSON lines. `default`: replaces what is none of JSON's types."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, default=default) + "\n"


def read_lines(path: Path) -> Iterator[Any]:
    """The values of a file of JSON lines. Texts in them may hold other line breaks, such as U+2028."""
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from map(json.loads, file)


@contextlib.contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Adds the path to errors of writing: the system names it only in errors of opening, compiled libraries
    never."""
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


def file_record(path: Path) -> dict[str, Any]:
    """The size and hash of a file, for a manifest."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def flush(path: Path) -> None:
    """Forces a file, or a folder and everything below it, to disk."""
    for file in [*path.rglob("*"), path]:
        if not file.is_symlink():
            flush_one(file)


def flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Folders that a run fills


def add_to_list(folder: Path, names: Iterable[str]) -> None:
    """Lists files as the run's own, before they are written. Creates the folder, but not the one above it: a
    run whose folder was moved away must not go on in a new one."""
    folder.mkdir(exist_ok=True)
    known, more = own_names(folder), set(names)
    if not more <= known:
        write_json(folder / LIST, sorted(known | more))


def replace_listed(folder: Path, names: Iterable[str], earlier: Iterable[str]) -> None:
    """As `add_to_list`; removes the run's own files among `earlier` that are not among `names`."""
    known, names = own_names(folder), set(names)
    if removed := known.intersection(earlier) - names:
        for name in removed:
            (folder / name).unlink(missing_ok=True)
        write_json(folder / LIST, sorted(known - removed))
    add_to_list(folder, names)


def own_names(folder: Path) -> set[str]:
    """The names in a folder's list, none without one."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return set(json.loads((folder / LIST).read_text(encoding="utf-8")))
    return set()


def files_at(place: Path) -> list[Path]:
    """The files and links at or below a path, without those in unfinished folders."""
    if place.is_symlink() or not place.is_dir():
        return [place] if os.path.lexists(place) else []
    found = []
    for parent, folders, files in os.walk(place):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        folders[:] = [name for name in folders if name not in links and not UNFINISHED.fullmatch(name)]
        found += [Path(parent) / name for name in sorted([*files, *links])]
    return found


def foreign_files(place: Path) -> list[Path]:
    """The files and links at or below a path that no list names."""
    files, first_list = files_at(place), f".{LIST}.unfinished"
    own: set[Path] = set()
    for path in files:
        if path.name == first_list:  # of a crash before a folder had its list
            own.add(path)
        elif path.name == LIST:
            names = [path, *(path.parent / name for name in own_names(path.parent))]
            own.update(names, (name.with_name(f".unfinished_{name.name}") for name in names))
    return [path for path in files if path not in own]


def remove_folder(place: Path, kept: Iterable[Path] | None = None) -> None:
    """Removes a folder's own files, unfinished folders, and then empty folders. `kept`: the files that stay;
    by default those that no list names."""
    kept = set(foreign_files(place) if kept is None else kept)
    removed = [path for path in files_at(place) if path not in kept]
    for path in sorted(removed, key=lambda path: path.name == LIST):  # the lists last: a crash may interrupt
        path.unlink(missing_ok=True)
    if place.is_symlink():
        return
    for path in sorted([*place.rglob("*"), place], reverse=True):
        if UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # a file, or not empty
            path.rmdir()


def replace_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write a temporary folder, flushes it to disk and renames it to `path`.

    A crash leaves the old folder or the new one. Between the two renames the old one has a temporary name;
    `recover_folder` renames it back. Files of the user in the old folder are kept.
    """
    unfinished, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("unfinished", "old"))
    shutil.rmtree(unfinished, ignore_errors=True)
    path.parent.mkdir(exist_ok=True)
    unfinished.mkdir()
    try:
        with path_in_errors(path):
            fill(unfinished)
            names = [file.relative_to(unfinished).as_posix() for file in files_at(unfinished)]
            add_to_list(unfinished, names)
            for file in foreign_files(path):
                target = unfinished / file.relative_to(path)
                if not os.path.lexists(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file, target, follow_symlinks=False)
            _apply_umask(unfinished)
            flush(unfinished)
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                os.rename(path, old)
            os.rename(unfinished, path)
            flush_one(path.parent)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


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


# The lock


def lock(folder: Path) -> TextIO:
    """Locks a folder, so that only one run uses it. Keep the returned file open. The kernel releases the lock
    when this process ends, even if it is killed. A file system without locks leaves the folder unlocked.

    Raises `InputError` naming the holder, or for a `.lock` that is not a run's.
    """
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
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"note           {folder}: its file system has no locks; use it for one run at a time", flush=True
        )
    if not LOCK_CONTENT.fullmatch(file.read(300)):
        raise InputError(f"--output_dir {folder}: its file .lock is not a run's; move it away")
    file.seek(0)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    # A worker that outlives this process must not keep the lock.
    os.register_at_fork(after_in_child=file.close)
    return file


# Temporary folders

_temporary = contextlib.ExitStack()
remove_temporary_folders = _temporary.close  # for a process that ends at once (`signals.exit_now`)
atexit.register(remove_temporary_folders)


def temporary_folder(prefix: str) -> Path:
    """Makes a folder with a free name, which is removed when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    return Path(_temporary.enter_context(folder))


def paths_in(folder: Path) -> list[Path]:
    """The paths in a folder, sorted. Raises `InputError` if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from None


def read_text(path: str | Path) -> str:
    """Reads a whole UTF-8 file. Raises `InputError`."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


# The thread

_all: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """Runs one job at a time in a thread. Jobs must not use the process group: training uses it at the same
    time."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "background work")
        self._job: Future | None = None
        _all.add(self)

    def start(self, job: Callable[[], None]) -> None:
        """Starts a job. `wait` for the previous one first: it raises its error."""
        self._job = self.thread.submit(job)

    def wait(self) -> None:
        """Waits for the running job; raises its error, once."""
        job, self._job = self._job, None
        if job is not None:
            job.result()


def finish_all() -> None:
    """Waits for all running jobs, whether they succeed or not. For a process that is about to exit."""
    for writer in list(_all):
        writer.thread.shutdown()
