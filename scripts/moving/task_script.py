"""Loads a task's script of app/ as a module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from samerun.errors import InputError
from samerun.runtime import Launch


def load_task_script(script: Path) -> tuple[type, type]:
    """(the script's class `Arguments`, its subclass of `samerun.task.Task`). Raises `InputError` for another
    file or none."""
    if not script.is_file():
        raise InputError(f"{script}: no such file; name a task's script, such as app/classify.py")
    sys.path.insert(0, str(script.resolve().parent))
    module = importlib.import_module(script.stem)
    from samerun.task import Task  # imports torch: after the script has set its environment

    tasks = [
        value for value in vars(module).values() if _is_defined_in(module, value) and issubclass(value, Task)
    ]
    if not hasattr(module, "Arguments") or len(tasks) != 1:
        raise InputError(
            f"{script}: not a task's script; expected a class Arguments and one subclass of samerun.task.Task"
        )
    return module.Arguments, tasks[0]


def _is_defined_in(module: Any, value: Any) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


def plain_launch(processes: int, use_cpu: bool) -> Launch:
    """A simple launch to load data for, if there is none or the requested one is invalid."""
    return Launch(
        launcher="python",
        rank=0,
        local_rank=0,
        world_size=processes,
        local_world_size=processes,
        use_cpu=use_cpu,
        backend="gloo",
        precision="no",
        timeout_seconds=0,
        deepspeed_file=None,
        deepspeed_config=None,
        max_grad_norm=0.0,
    )
