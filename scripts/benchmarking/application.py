"""The benchmark's interface to the application's tasks and engine. Other modules import only kernels, the
clock and text functions of app/.

Functions import the application when they are called, so that other contenders do not wait for its imports.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from benchmarking.processes import REPOSITORY

Options = dict[str, Any]  # command-line arguments by name
TRAINING = {"do_train": True, "do_eval": False}


class MeasurementDone(Exception):  # noqa: N818 - no error
    """Carries the result of the measured part out of the application."""


def initialize() -> None:
    """The first calls of every script of app/."""
    from samerun.cli import set_up_host

    set_up_host()


def run_options(settings: dict[str, Any]) -> Options:
    """The arguments of every run, which switch off reports, evaluations and checkpoints."""
    return {
        "seed": settings["seed"], "mixed_precision": settings["precision"], "report_to": "none",
        "output_dir": settings["folder"], "overwrite_output_dir": True, "eval_strategy": "no",
        "save_steps": 0,
    }  # fmt: skip


def make_task(script: str, options: Options) -> Any:
    """The task of app/SCRIPT.py with these arguments, before it reads files."""
    from samerun import task_scripts
    from samerun.parsing import parse

    arguments_class, task_class = task_scripts.load(REPOSITORY / "app" / f"{script}.py")
    return task_class(
        parse(
            arguments_class,
            argv=[word for name, value in options.items() for word in (f"--{name}", str(value))],
        )
    )


def train(script: str, options: Options, measure: Callable[..., Any]) -> Any:
    """Runs app/SCRIPT.py up to the training; returns `measure`(train, training). `train`() does the training,
    the `samerun.training.Training` `training`."""
    from samerun.training import Training

    return _run_until(Training, "fit", make_task(script, options | TRAINING), measure)


def _run_until(module: Any, name: str, task: Any, measure: Callable[..., Any]) -> Any:
    from samerun.main import run_task

    work = getattr(module, name)
    # A function, which is a method where `module` is a class.
    setattr(module, name, lambda *inputs, **_: _measure_and_leave(measure, work, *inputs))
    try:
        run_task(task, task.arguments)
    except MeasurementDone as done:
        return done.args[0]
    raise RuntimeError(f"{task.name} ended before the measured part")


def _measure_and_leave(measure: Callable[..., Any], work: Callable[..., Any], *inputs: Any) -> NoReturn:
    raise MeasurementDone(measure(partial(work, *inputs), *inputs))


def prepare(script: str, options: Options) -> tuple[Any, Any]:
    """(the task, its training steps). `steps[i]`: the micro-batches of optimizer step i."""
    from samerun.plan import make_plan
    from samerun.runtime import describe_launch
    from samerun.training import train_batches

    task = make_task(script, options | TRAINING)
    data = task.load(describe_launch(task.arguments), task.arguments.modes)
    plan = make_plan(task.arguments, data.splits["train"], task.launch)
    return task, train_batches(task.arguments, data, plan, task.launch)


def build(task: Any, **changes: Any) -> Any:
    """The run's model, built with changed arguments."""
    from samerun.main import build_model

    task = copy.copy(task)
    task.arguments = replace(task.arguments, **changes)
    return build_model(task, task.arguments.seed)


def token_columns(split: Any) -> dict[str, list[list[int]]]:
    """The token ids of documents and titles."""
    columns = {"input_ids": split.tokens, "labels": split.targets}
    return {name: [rows[i].tolist() for i in range(len(rows))] for name, rows in columns.items()}
