"""The application's scripts in this process, as users start them: arguments in; exit code and what was printed out."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from finetune.application import run_task
from finetune.arguments.parsing import parse, validate
from finetune.launching import signals
from finetune.launching.shutdown import failures_end_the_job

# Script of app/ or of the tests -> its task. Imported when one is run: MONAI alone takes seconds.
TASKS = {
    "classify": "MultiLabelClassification",
    "titlegen": "TitleGeneration",
    "image_classify": "ImageClassification",
    "segment": "Segmentation",
    "segment3d": "VolumeSegmentation",
    "vector_task": "Regression",
}
QUIET = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)  # as in Python itself


class Left(BaseException):
    """The process would have ended here."""


@dataclass(frozen=True)
class Ended:
    """How a script ended."""

    code: int
    out: str
    err: str


@contextlib.contextmanager
def heard_like_a_process() -> Iterator[list[str]]:
    """Warnings and the libraries' logs as a new process would show them; gives the warnings that came."""
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_warning()
    datasets.utils.logging.set_verbosity_warning()
    for name in ("transformers", "datasets", "accelerate", "torch", None):
        for handler in logging.getLogger(name).handlers:
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr  # theirs is that of another test, which is closed
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for category in QUIET:
            warnings.simplefilter("ignore", category)
        told: list[str] = []
        yield told
        told += [f"{warning.category.__name__}: {warning.message}" for warning in caught]


@pytest.fixture
def script(monkeypatch, environment, token_cache, capfd) -> Callable[[str, list[str]], Ended]:
    """A function that runs a task's script with these arguments."""
    import datasets
    import huggingface_hub
    from accelerate.state import AcceleratorState, GradientState

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(signals, "watch_launcher", lambda generations: None)

    def exit_now(code: int) -> NoReturn:
        raise Left(code)

    monkeypatch.setattr(signals, "exit_now", exit_now)

    def run(task: str, argv: list[str]) -> Ended:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        capfd.readouterr()
        module, code = importlib.import_module(task), 0
        with heard_like_a_process() as told:
            try:
                with failures_end_the_job(debug="--debug" in argv):
                    arguments = parse(module.Arguments, argv)
                    validate(arguments)
                    run_task(getattr(module, TASKS[task])(arguments), arguments)
            except Left as left:
                code = left.args[0]
        for worker in multiprocessing.active_children():  # of a loader that failed; a process that ends takes them along
            worker.kill()
        out, err = capfd.readouterr()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return Ended(code, out, err + "".join(f"{text}\n" for text in told))

    return run


def check_evaluated_alike(trained: Path, alone: Path) -> None:
    """The folder of an evaluation without training has the numbers that the training has for its best model. Not the tuned ones
    of labels: the training's are cross-fitted, an exported model has its thresholds."""
    ours, theirs = (json.loads((folder / "metrics.json").read_text(encoding="utf-8")) for folder in (trained, alone))
    numbers = {key: value for key, value in theirs.items() if key.startswith("eval_") and "tuned" not in key}
    assert {"eval_loss"} < numbers.keys() <= ours.keys()
    assert numbers == pytest.approx({key: ours[key] for key in numbers}, rel=0, abs=1e-6)
