"""A run of a task's script in a forked process, which counts its calls that reach the disk and may die at one of them."""

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
    script: Path, arguments: list[str], log: int, report: int, disk_calls: tuple[str, ...], deadly: int | None
) -> NoReturn:
    """Runs the script as Python does, with `log` in place of stdout and stderr, and ends the process.

    Each call of a function of `os` that `disk_calls` names is written to `report`, a line with the file. At number `deadly`
    (from 0) the process is killed by SIGKILL in place of the call.
    """
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 3
    try:
        _watch_disk(report, disk_calls, deadly)
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


def _watch_disk(report: int, disk_calls: tuple[str, ...], deadly: int | None) -> None:
    count, lock = 0, threading.Lock()

    def watched(name: str, call: Callable) -> Callable:
        def counted(target: Any, *rest: Any, **named: Any) -> Any:
            nonlocal count
            with lock:  # a thread writes checkpoints beside the run
                file = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
                os.write(report, f"{name} {file}\n".encode())
                if count == deadly:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
            return call(target, *rest, **named)

        return counted

    for name in disk_calls:
        setattr(os, name, watched(name, getattr(os, name)))
