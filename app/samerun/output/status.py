"""status.json: the state of a training run ("running", "done", "stopped", "failed"). Rank 0 only.

A launcher's exit code is not enough: torchrun turns every code but 0 into 1, and a killed deepspeed launcher
returns 0.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from pathlib import Path
from typing import Any

from samerun.output import written
from samerun.output.files import as_json, write_json
from samerun.output.run_folder import STATUS, is_present

_lock = threading.Lock()  # the checkpoint and signal threads write the status too
_path: Path | None = None
_step = 0
_micro_batch_parts = 1


def begin(folder: Path, step: int) -> None:
    """Writes that the run in `folder`, which this process has locked, starts from `step`."""
    global _path, _step, _micro_batch_parts
    _path, _step, _micro_batch_parts = folder / STATUS, step, 1
    written.add(folder, _path)
    _write("running", None)


def saved(step: int) -> None:
    """Writes the step of the newest checkpoint. Ignores a full disk."""
    global _step
    _step = step
    with contextlib.suppress(OSError):
        _write("running", None)


def cut_micro_batches(parts: int) -> None:
    """Writes into how many parts each micro-batch is now cut, because it did not fit into memory. Ignores a
    full disk."""
    global _micro_batch_parts
    _micro_batch_parts = parts
    with contextlib.suppress(OSError):
        _write("running", None)


def failing(reason: str) -> None:
    """Writes a first reason of a failure. `end` may replace it, if this process lives that long."""
    _write_or_overwrite("failed", reason)


def has_begun() -> bool:
    """Whether this process writes the status of a training run."""
    return _path is not None


def end(state: str, reason: str | None = None) -> None:
    """Writes "done", "stopped" or "failed". Does nothing before `begin` or after another `end`. Ignores a
    disk that is full or gone: that may be why the run ends."""
    global _path
    _write_or_overwrite(state, reason)
    _path = None


def _write(state: str, reason: str | None) -> None:
    with _lock:
        if _path is not None and is_present(
            _path
        ):  # a folder that was moved may have been replaced by another run's
            write_json(_path, _content(state, reason))


def _write_or_overwrite(state: str, reason: str | None) -> None:
    """Overwrites the file in place if the disk has no room for a new one."""
    try:
        _write(state, reason)
    except OSError:
        if not is_present(_path):
            return
        with contextlib.suppress(OSError), _lock, _path.open("r+", encoding="utf-8") as file:
            file.write(as_json(_content(state, reason)))
            file.truncate()


def _content(state: str, reason: str | None) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "state": state,
        "step": _step,
        "time": now,
        "reason": reason,
        "micro_batch_parts": _micro_batch_parts,
    }
