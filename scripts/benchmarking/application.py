"""All that the benchmark uses of the application's tasks and engine. Other modules import kernels, the clock and text functions
of app/ alone.

Imports stand in the functions: processes that measure something else must not wait for the application's imports.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

Options = dict[str, Any]  # command-line arguments by name
Settings = dict[str, Any]


class Finished(Exception):  # noqa: N818 - no error
    """Leaves the application with a result once the measured part is over."""

    def __init__(self, result: Any) -> None:
        self.result = result


def begin() -> None:
    """What the scripts of app/ do first."""
    from finetune import garbage_collection

    garbage_collection.begin()


def run_options(settings: Settings) -> Options:
    """The arguments of every run: nothing is reported, evaluated or saved."""
    return {
        "seed": settings["seed"], "mixed_precision": settings["precision"], "report_to": "none",
        "output_dir": settings["folder"], "overwrite_output_dir": True, "eval_strategy": "no", "save_steps": 0,
    }  # fmt: skip


def parse(task: str, options: Options) -> Any:
    from finetune.arguments.parsing import parse as parse_arguments

    argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return parse_arguments(importlib.import_module(task).Arguments, argv=argv)


# Whole commands ----------------------------------------------------------------------------------------------------------


def train(task: str, options: Options, observe: Callable[[Any, Callable[[], dict]], Any]) -> Any:
    """Runs app/TASK.py until it is ready to train; returns `observe`(training, train). `training` is the engine's, with model,
    task and steps; `train` trains and returns the train_* metrics."""
    from finetune.training import loop

    loop.fit = partial(_observe_training, observe, loop.fit)
    return _run(task, options | {"do_train": True, "do_eval": False})


def predict(task: str, options: Options, observe: Callable[[Any, Any, Any, Callable], Any]) -> Any:
    """Runs app/TASK.py until it is ready to predict; returns `observe`(model, task, rows, predict), where `predict` returns
    (records, seconds)."""
    from finetune.training import evaluation

    evaluation.predict = partial(_observe_prediction, observe, evaluation.predict)
    return _run(task, options | {"do_predict": True})


def _run(task: str, options: Options) -> Any:
    try:
        importlib.import_module(task).main(parse(task, options))
    except Finished as finished:
        return finished.result
    raise RuntimeError(f"app/{task}.py ended before the measured part")


def _observe_training(observe: Callable, fit: Callable, run: Any, plan: Any, training: Any, *rest: Any) -> NoReturn:
    raise Finished(observe(training, partial(fit, run, plan, training, *rest)))


def _observe_prediction(observe: Callable, predict: Callable, run: Any, model: Any, task: Any, rows: Any) -> NoReturn:
    raise Finished(observe(model, task, rows, partial(predict, run, model, task, rows)))


def record_saves(seconds: list[float]) -> None:
    """From now on every save adds the seconds for which it holds the training."""
    from finetune.training import loop

    loop._save = partial(_save, loop._save, seconds)


def _save(save: Callable, seconds: list[float], *args: Any) -> None:
    save(*args)
    *_, stalls = args
    seconds.append(stalls[-1])


def record_parts(part: Callable[[str], AbstractContextManager]) -> None:
    """From now on every part of a step runs within part(NAME)."""
    from finetune.reports import profiling
    from finetune.training import step

    step.part = profiling.part = part


# Parts of a command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """What a run of one process would train on. `steps[i]`: the micro-batches of optimizer step i."""

    arguments: Any
    data: Any
    steps: Any

    def title_model(self, plain: bool = False) -> Any:
        """The run's own model for titles. `plain`: with transformers' attention."""
        import titlegen

        return titlegen.build_model(replace(self.arguments, attention="transformers") if plain else self.arguments, self.data)

    def title_loss(self) -> Any:
        """The titles' task, for its loss alone."""
        from models.titles import TitleTask

        return TitleTask("loss", self.data.start_id, self.data.tokenizer.pad_token_id, None, None, None, "default")


def load(task: str, options: Options, predict: bool = False) -> tuple[Any, Any]:
    """(arguments, data): reads, checks and tokenizes the files of a run."""
    arguments = parse(task, options | ({"do_predict": True} if predict else {"do_train": True, "do_eval": False}))
    return arguments, importlib.import_module(task).load_data(arguments, not predict, False, predict)


def prepare(task: str, options: Options, on_cpu: bool) -> Prepared:
    from finetune.plan import make_plan

    arguments, data = load(task, options)
    plan = make_plan(arguments, len(data.train.tokens), 1, by_tokens=on_cpu)
    return Prepared(arguments, data, importlib.import_module(task).train_steps(arguments, data, plan, 0))


def token_columns(split: Any) -> dict[str, list[list[int]]]:
    """The token ids of documents and titles."""
    columns = {"input_ids": split.tokens, "labels": split.labels}
    return {name: [rows[i].tolist() for i in range(len(rows))] for name, rows in columns.items()}


def step_lengths(steps: Any, count: int) -> tuple[list[np.ndarray], int]:
    """(the row lengths of the first `count` optimizer steps, their tokens in all with padding)."""
    padded = sum(steps.tokens(step)[1] for step in range(count))
    return [steps.lengths[steps.rows(step)] for step in range(count)], padded


class EngineStep:
    """The engine's optimizer step for classification, on one process of a launch: `update`(micro-batches of a step)."""

    def __init__(self, options: Options) -> None:
        import classify

        from finetune.launching import processes
        from finetune.launching.launch import describe_launch
        from finetune.plan import make_plan
        from finetune.training.optimizer import build_optimizer
        from finetune.training.step import train_step

        arguments, data = load("classify", options)
        self.launch = describe_launch(arguments)
        plan = make_plan(arguments, len(data.train.texts), self.launch.world_size, self.launch.passes_by_tokens)
        self.run = processes.start(self.launch, plan.batch)
        task, packed = classify.make_task(arguments, data), classify.leaves_padding_out(arguments, data, self.launch)
        model = classify.build_model(arguments, data, task, packed)
        self.model, optimizer = self.run.accelerator.prepare(model, build_optimizer(arguments, model, 1e-5))
        self.model.train()
        self.steps = classify.train_steps(arguments, data, plan, self.launch.rank, packed)
        self.update = partial(train_step, self.run, self.model, optimizer, task, max_grad_norm=1.0)


def multilabel_metrics(logits: np.ndarray, labels: np.ndarray) -> Callable[[], dict[str, Any]]:
    """Work that computes all metrics of an evaluation."""
    from models.multilabel import MultiLabelTask

    records = [{"row": row, "logits": logits[row], "labels": labels[row]} for row in range(len(logits))]
    return partial(MultiLabelTask("f1_macro", labels.shape[1], None, 0.0).score, records)
