"""Locks of compiled parts that do not outlive their holder, and a word about what they are held for. Level 2.

torch (2.13) takes a folder of compiled parts for locked while a file `lock` lies in it. A process that is killed there, as
launchers do when another rank finds bad input, leaves the file, and every later run waits for it without end. Here the lock is
the kernel's, on that same file. Compiling takes half a minute on two quiet cores and minutes on busy ones, in silence.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
from pathlib import Path
from typing import Any

from finetune.reading.progress import PATIENCE

WAITING_PATIENCE = 60  # seconds; that the job itself compiles has been said by then


def use_kernel_locks() -> None:
    """From now on torch's batons are kernel locks in this process, whatever files an earlier one has left. What holds one for
    long, and who waits long for one, says so on standard error."""
    from torch.utils.file_baton import FileBaton

    FileBaton.try_acquire = _try_acquire
    FileBaton.wait = _wait
    FileBaton.release = _release


def _try_acquire(self: Any) -> bool:
    while True:
        fd = os.open(self.lock_file_path, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        if _is_at(fd, self.lock_file_path):
            break
        os.close(fd)  # its holder removed it between the two: nobody else would meet us there
    self.fd = fd
    folder = Path(self.lock_file_path).parent
    self.word = _say_after(PATIENCE, f"compiling {folder.name} for this machine, once, into {folder}")
    return True


def _wait(self: Any) -> None:
    with contextlib.suppress(FileNotFoundError):  # released meanwhile
        fd = os.open(self.lock_file_path, os.O_RDWR)
        folder = Path(self.lock_file_path).parent
        word = _say_after(WAITING_PATIENCE, f"waiting for another process that compiles {folder.name} into {folder}")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        finally:
            word.cancel()
            os.close(fd)


def _release(self: Any) -> None:
    if self.fd is None:
        return
    self.word.cancel()
    with contextlib.suppress(FileNotFoundError):
        os.remove(self.lock_file_path)
    os.close(self.fd)
    self.fd = None


def _is_at(fd: int, path: str) -> bool:
    """Whether `path` still names the file that is open as `fd`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def _say_after(seconds: float, line: str) -> threading.Timer:
    """A line that is written unless it is cancelled before."""
    timer = threading.Timer(seconds, print, (f"note           {line}",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    return timer
