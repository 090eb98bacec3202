"""status.json: whether a training run goes on, and how it ended.

A launcher's exit code does not tell: torchrun turns every code but 0 into 1, and deepspeed's is 0 when it was killed itself.
Written on rank 0 only, and only by a run that has taken its folder.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from pathlib import Path
from typing import Any

from finetune.output import written
from finetune.output.files import as_json, write_json
from finetune.output.run_folder import STATUS, is_present

_lock = threading.Lock()  # checkpoints are written, and signals received, by threads
_path: Path | None = None
_step = 0
_micro_batch_parts = 1


def begin(folder: Path, step: int) -> None:
    """The run has taken `folder` and starts from `step`. A process that may be ended by a signal must have `stopped` called."""
    global _path, _step, _micro_batch_parts
    _path, _step, _micro_batch_parts = folder / STATUS, step, 1
    written.add(folder, _path)
    _write("running", None)


def saved(step: int) -> None:
    """The run goes on, and what it has done up to `step` is on disk. A disk too full to say so is no reason to end."""
    global _step
    _step = step
    with contextlib.suppress(OSError):
        _write("running", None)


def cut_micro_batches(parts: int) -> None:
    """Micro-batches did not fit into memory: each is cut into so many parts from here on."""
    global _micro_batch_parts
    _micro_batch_parts = parts
    with contextlib.suppress(OSError):
        _write("running", None)


def failing(reason: str) -> None:
    """The run fails; `end` may still say better why, if this process lives that long."""
    _write_anyhow("failed", reason)


def has_begun() -> bool:
    """Whether this process is a training run's and writes its status."""
    return _path is not None


def end(state: str, reason: str | None = None) -> None:
    """The run ends: "done", "stopped" or "failed". Does nothing before `begin`, and nothing the second time; never raises for
    a disk that is full or gone, since that may be why the run ends."""
    global _path
    _write_anyhow(state, reason)
    _path = None


def _write(state: str, reason: str | None) -> None:
    with _lock:
        if _path is not None and is_present(_path):  # else another folder may have its name
            write_json(_path, _content(state, reason))


def _write_anyhow(state: str, reason: str | None) -> None:
    """Writes over the old file where there is no room for a new one: it has its place on the disk."""
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
    return {"state": state, "step": _step, "time": now, "reason": reason, "micro_batch_parts": _micro_batch_parts}
