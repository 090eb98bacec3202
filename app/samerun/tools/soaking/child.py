"""Runs a task's script in a forked process, records its disk calls and may kill the process at one of
them."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def run_script(
    script: Path,
    arguments: list[str],
    log: int,
    report: int,
    disk_calls: tuple[str, ...],
    kill_at: int | None,
) -> NoReturn:
    """Runs the script as Python does, with `log` as stdout and stderr, and ends the process.

    Writes a line "CALL FILE" to `report` for each call of the functions `disk_calls` of `os`. Call number
    `kill_at` (from 0) kills the process by SIGKILL instead.
    """
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 3
    try:
        _watch_disk(report, disk_calls, kill_at)
        sys.path.insert(0, str(script.parent))
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch_disk(report: int, disk_calls: tuple[str, ...], kill_at: int | None) -> None:
    count, lock = 0, threading.Lock()

    def watched(name: str, call: Callable) -> Callable:
        def counted(target: Any, *rest: Any, **named: Any) -> Any:
            nonlocal count
            with lock:  # checkpoints are written by a thread
                file = (
                    os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
                )
                os.write(report, f"{name} {file}\n".encode())
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
            return call(target, *rest, **named)

        return counted

    for name in disk_calls:
        setattr(os, name, watched(name, getattr(os, name)))
