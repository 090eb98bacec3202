"""A task's script as a module: what other scripts need of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from finetune.errors import InputError
from finetune.launching.launch import Launch


def load_task_script(script: Path) -> tuple[type, type]:
    """(the script's `Arguments`, its subclass of `finetune.task.Task`). Raises `InputError` for a script that has none."""
    sys.path.insert(0, str(script.resolve().parent))
    module = importlib.import_module(script.stem)
    from finetune.task import Task  # imports torch, as the script itself does

    tasks = [value for value in vars(module).values() if _is_defined_in(module, value) and issubclass(value, Task)]
    if not hasattr(module, "Arguments") or len(tasks) != 1:
        raise InputError(f"{script}: is no task's script, which has a class Arguments and one subclass of finetune.task.Task")
    return module.Arguments, tasks[0]


def _is_defined_in(module: Any, value: Any) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


def plain_launch(processes: int, use_cpu: bool) -> Launch:
    """A launch to load data for where there is none, or where the requested one contradicts itself."""
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
