"""The benchmark's interface to the application's tasks and engine. Other modules import only what reads texts
and loads models from app/.

Functions import the application when they are called, so that other contenders do not wait for its imports.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from benchmarking.processes import REPOSITORY

Options = dict[str, Any]  # command-line arguments by name
TRAINING = {"do_train": True, "do_eval": False}


class MeasurementDone(Exception):  # noqa: N818 - no error
    """Carries the result of the measured part out of the application."""


def run_options(settings: dict[str, Any]) -> Options:
    """The arguments of every training, which switch off reports, evaluations and checkpoints."""
    return {
        "seed": settings["seed"], "mixed_precision": settings["precision"], "report_to": "none",
        "output_dir": settings["folder"], "overwrite_output_dir": True, "eval_strategy": "no",
        "save_steps": 0, "global_batch_size": settings["batch_size"],
        "learning_rate": settings["learning_rate"], "max_steps": settings["max_steps"],
    }  # fmt: skip


def make_task(script: str, options: Options) -> Any:
    """The task of app/SCRIPT.py with these arguments, before it reads files."""
    from samerun import task_scripts
    from samerun.parsing import parse

    arguments_class, task_class = task_scripts.load(REPOSITORY / "app" / f"{script}.py")
    return task_class(parse(arguments_class, task_scripts.as_words(options | TRAINING)))


def train(script: str, options: Options, measure: Callable[[Any, Callable[[], Any]], Any]) -> Any:
    """Runs app/SCRIPT.py up to the training; returns `measure`(model, train). `train`() does the training."""
    from samerun.main import run_task
    from samerun.training import Training

    task, fit = make_task(script, options), Training.fit
    Training.fit = lambda training: _measure_and_leave(measure, training, fit)
    try:
        run_task(task, task.arguments)
    except MeasurementDone as done:
        return done.args[0]
    raise RuntimeError(f"{task.name} ended before the training")


def _measure_and_leave(measure: Callable[..., Any], training: Any, fit: Callable[..., Any]) -> NoReturn:
    raise MeasurementDone(measure(training.model, partial(fit, training)))


def prepare(script: str, options: Options) -> tuple[Any, Any]:
    """(the task, its rows to train on)."""
    from samerun.launch import describe_launch

    task = make_task(script, options)
    data = task.load(describe_launch(task.arguments), task.arguments.modes)
    return task, data.splits["train"]


def build(task: Any) -> Any:
    """The run's model."""
    from samerun.main import build_model

    return build_model(task, task.arguments.seed)
