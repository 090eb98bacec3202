"""Locks of compiled parts that do not outlive their holder. Level 1.

torch (2.13) takes a folder of compiled parts for locked while a file `lock` lies in it. A process that is killed there, as
launchers do when another rank finds bad input, leaves the file, and every later run waits for it without end. Here the lock is
the kernel's, on that same file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import Any


def use_kernel_locks() -> None:
    """From now on torch's batons are kernel locks in this process, whatever files an earlier one has left."""
    from torch.utils.file_baton import FileBaton

    FileBaton.try_acquire = _try_acquire
    FileBaton.wait = _wait
    FileBaton.release = _release


def _try_acquire(self: Any) -> bool:
    fd = os.open(self.lock_file_path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return False
    self.fd = fd
    return True


def _wait(self: Any) -> None:
    with contextlib.suppress(FileNotFoundError):  # released meanwhile
        fd = os.open(self.lock_file_path, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        finally:
            os.close(fd)


def _release(self: Any) -> None:
    if self.fd is None:
        return
    with contextlib.suppress(FileNotFoundError):
        os.remove(self.lock_file_path)
    os.close(self.fd)
    self.fd = None
