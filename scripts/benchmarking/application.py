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
    from finetune.arguments.parsing import parse

    module = importlib.import_module(script)
    argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return getattr(module, TASKS[script])(parse(module.Arguments, argv=argv))


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

    task, data = load(script, options | TRAINING)
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
