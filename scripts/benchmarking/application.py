"""All that the benchmark uses of the application's tasks and engine. Other modules import kernels, the clock and text functions
of app/ alone.

Imports stand in the functions: processes that measure something else must not wait for the application's imports.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from benchmarking.processes import REPOSITORY

Options = dict[str, Any]  # command-line arguments by name
TRAINING, PREDICTION = {"do_train": True, "do_eval": False}, {"do_predict": True}


class Finished(Exception):  # noqa: N818 - no error
    """Leaves the application with a result once the measured part is over."""


def begin() -> None:
    """What the scripts of app/ do first."""
    from finetune import garbage_collection
    from finetune.launching import host_settings

    host_settings.prepare()
    garbage_collection.begin()


def run_options(settings: dict[str, Any]) -> Options:
    """The arguments of every run: nothing is reported, evaluated or saved."""
    return {
        "seed": settings["seed"], "mixed_precision": settings["precision"], "report_to": "none",
        "output_dir": settings["folder"], "overwrite_output_dir": True, "eval_strategy": "no", "save_steps": 0,
    }  # fmt: skip


def make_task(script: str, options: Options) -> Any:
    """The task of app/SCRIPT.py with these arguments; no file has been read."""
    from moving.task_script import load_task_script

    from finetune.arguments.parsing import parse

    arguments_class, task_class = load_task_script(REPOSITORY / "app" / f"{script}.py")
    return task_class(
        parse(arguments_class, argv=[word for name, value in options.items() for word in (f"--{name}", str(value))])
    )


def train(script: str, options: Options, measure: Callable[..., Any]) -> Any:
    """Runs app/SCRIPT.py until it is ready to train; returns `measure`(train, run, training, state): `train` does its training,
    the others are what the engine's `fit` is given."""
    from finetune.training import loop

    return _run_until(loop, "fit", make_task(script, options | TRAINING), measure)


def predict(script: str, options: Options, measure: Callable[..., Any]) -> Any:
    """Runs app/SCRIPT.py until it is ready to predict; returns `measure`(predict, run, model, task, rows): `predict` does that,
    the others are what the engine's `predict` is given."""
    from finetune import application

    return _run_until(application, "predict", make_task(script, options | PREDICTION), measure)


def _run_until(module: Any, name: str, task: Any, measure: Callable[..., Any]) -> Any:
    from finetune.application import run_task

    setattr(module, name, partial(_leave, measure, getattr(module, name)))
    try:
        run_task(task, task.arguments)
    except Finished as finished:
        return finished.args[0]
    raise RuntimeError(f"{task.name} ended before the measured part")


def _leave(measure: Callable[..., Any], work: Callable[..., Any], *given: Any, **_: Any) -> NoReturn:
    raise Finished(measure(partial(work, *given), *given))


def load(script: str, options: Options) -> tuple[Any, Any]:
    """(the task, its data): the files of a run read, checked and tokenized."""
    from finetune.launching.launch import describe_launch

    task = make_task(script, options)
    return task, task.load(describe_launch(task.arguments), task.arguments.modes)


def prepare(script: str, options: Options) -> tuple[Any, Any]:
    """(the task, its steps): what a run would train on. `steps[i]`: the micro-batches of optimizer step i."""
    from finetune.plan import make_plan
    from finetune.training_setup import train_steps

    task, data = load(script, options | TRAINING)
    plan = make_plan(task.arguments, data.splits["train"], task.launch)
    return task, train_steps(task.arguments, data, plan, task.launch.rank)


def build(task: Any, **changed: Any) -> Any:
    """The run's own model, with some arguments changed."""
    from finetune.application import build_model

    task = copy.copy(task)
    task.arguments = replace(task.arguments, **changed)
    return build_model(task, task.arguments.seed)


def token_columns(split: Any) -> dict[str, list[list[int]]]:
    """The token ids of documents and titles."""
    columns = {"input_ids": split.tokens, "labels": split.targets}
    return {name: [rows[i].tolist() for i in range(len(rows))] for name, rows in columns.items()}
