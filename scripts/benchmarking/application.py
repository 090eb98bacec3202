"""All that the benchmark uses of the application's tasks and engine. Other modules import kernels, the clock and text functions
of app/ alone.

Imports stand in the functions: processes that measure something else must not wait for the application's imports.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

Options = dict[str, Any]  # command-line arguments by name
# Script of app/ -> its task.
TASKS = {
    "classify": "MultiLabelClassification", "titlegen": "TitleGeneration", "image_classify": "ImageClassification",
    "segment": "Segmentation", "segment3d": "VolumeSegmentation",
}  # fmt: skip


class Finished(Exception):  # noqa: N818 - no error
    """Leaves the application with a result once the measured part is over."""

    def __init__(self, result: Any) -> None:
        self.result = result


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
    from finetune.arguments.parsing import parse

    module = importlib.import_module(script)
    argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return getattr(module, TASKS[script])(parse(module.Arguments, argv=argv))


# Whole commands ----------------------------------------------------------------------------------------------------------


def train(script: str, options: Options, observe: Callable[[Any, Callable[[], dict]], Any]) -> Any:
    """Runs app/SCRIPT.py until it is ready to train; returns `observe`(training, train). `training` is the engine's, with
    model, task and steps; `train` trains and returns the train_* metrics."""
    from finetune.training import loop

    loop.fit = partial(_observe_training, observe, loop.fit)
    return _run(script, options | {"do_train": True, "do_eval": False})


def predict(script: str, options: Options, observe: Callable[[Any, Any, Any, Callable], Any]) -> Any:
    """Runs app/SCRIPT.py until it is ready to predict; returns `observe`(model, task, split, predict), where `predict` returns
    the lines of predictions.jsonl."""
    from finetune import application

    application.predict = partial(_observe_prediction, observe, application.predict)
    return _run(script, options | {"do_predict": True})


def _run(script: str, options: Options) -> Any:
    from finetune.application import run_task

    task = make_task(script, options)
    try:
        run_task(task, task.arguments)
    except Finished as finished:
        return finished.result
    raise RuntimeError(f"app/{script}.py ended before the measured part")


def _observe_training(observe: Callable, fit: Callable, run: Any, training: Any, state: Any) -> NoReturn:
    raise Finished(observe(training, partial(fit, run, training, state)))


def _observe_prediction(observe: Callable, predict: Callable, run: Any, model: Any, task: Any, rows: Any, **_: Any) -> NoReturn:
    raise Finished(observe(model, task, rows.split, partial(_lines, predict, run, model, task, rows)))


def _lines(predict: Callable, run: Any, model: Any, task: Any, rows: Any) -> list[dict[str, Any]]:
    predictions, _ = predict(run, model, task, rows)
    return list(task.prediction_lines(predictions, rows.split))


# Parts of a command ------------------------------------------------------------------------------------------------------


def load(script: str, options: Options, predict: bool = False) -> tuple[Any, Any]:
    """(the task, its data): the files of a run read, checked and tokenized."""
    from finetune.launching.launch import describe_launch

    task = make_task(script, options | ({"do_predict": True} if predict else {"do_train": True, "do_eval": False}))
    return task, task.load(describe_launch(task.arguments), task.arguments.modes)


@dataclass(frozen=True)
class Prepared:
    """What a process of a run would train on. `steps[i]`: its micro-batches of optimizer step i."""

    task: Any
    plan: Any
    steps: Any

    def model(self, plain: bool = False) -> Any:
        """The run's own model. `plain`: as transformers computes it."""
        from finetune.application import build_model

        task = copy.copy(self.task)
        if plain:
            task.arguments = replace(task.arguments, kernels="reference")
        return build_model(task, task.arguments.seed)


def prepare(script: str, options: Options) -> Prepared:
    from finetune.plan import make_plan
    from finetune.training_setup import train_steps

    task, data = load(script, options)
    plan = make_plan(task.arguments, data.splits["train"], task.launch)
    return Prepared(task, plan, train_steps(task.arguments, data, plan, task.launch.rank))


def token_columns(split: Any) -> dict[str, list[list[int]]]:
    """The token ids of documents and titles."""
    columns = {"input_ids": split.tokens, "labels": split.targets}
    return {name: [rows[i].tolist() for i in range(len(rows))] for name, rows in columns.items()}


class EngineStep:
    """The engine's optimizer step for classification, on one process of a launch: `update`(micro-batches of a step)."""

    def __init__(self, options: Options) -> None:
        from finetune.launching import processes
        from finetune.training.optimizer import build_optimizer
        from finetune.training.step import train_step

        prepared = prepare("classify", options)
        task, model, self.steps = prepared.task, prepared.model(), prepared.steps
        self.run = processes.start(task.launch, prepared.plan.batch)
        optimizer = build_optimizer(task.arguments, model, 1e-5, task.learning_rate_scale)
        self.model, optimizer = self.run.accelerator.prepare(model, optimizer)
        self.model.train()
        self.update = partial(train_step, self.run, self.model, optimizer, task, max_grad_norm=1.0)


def multilabel_metrics(logits: np.ndarray, labels: np.ndarray) -> Callable[[], dict[str, Any]]:
    """Work that computes all metrics of an evaluation."""
    from finetune.metrics.multilabel_metric import MultiLabelMetric

    compute = MultiLabelMetric().compute
    return partial(compute, predictions=logits, references=labels, from_logits=True, tuned_thresholds="tune")
