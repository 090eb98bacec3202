"""Runs the application's scripts in this process and returns exit code and output."""

from __future__ import annotations

import contextlib
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
from run_folders import check_run_folder, read_json
from safetensors.torch import load_file

from samerun import signals
from samerun.cli import shows_traces
from samerun.signals import failures_end_the_job
from samerun.task_scripts import read_command
from samerun.tools.moving.outcome import TOLERANCE, read_gradients, rounding_alone, weight_differences

FOLDERS = Path(__file__).parents[1] / "app", Path(__file__).parent  # of tasks' scripts
IGNORED = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)  # Python's defaults


class ProcessExit(BaseException):
    """Stands for the end of the process."""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    def check(self) -> Ended:
        """Fails unless the script has succeeded. Returns itself."""
        assert self.code == 0, self.err
        return self

    def silent(self) -> Ended:
        """Fails unless it has succeeded without a warning. Returns itself."""
        assert (self.code, self.err) == (0, "")
        return self


@contextlib.contextmanager
def default_logging() -> Iterator[list[str]]:
    """Warnings and logs as in a new process. Yields a list, which gets the warnings at the end."""
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_warning()
    datasets.utils.logging.set_verbosity_warning()
    loggers = map(logging.getLogger, ("transformers", "datasets", "accelerate", "torch", None))
    handlers = [each for logger in loggers for each in logger.handlers if type(each) is logging.StreamHandler]
    for handler in handlers:
        handler.stream = sys.stderr  # instead of that of an earlier test
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for category in IGNORED:
            warnings.simplefilter("ignore", category)
        messages: list[str] = []
        yield messages
        messages += [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    for handler in handlers:
        handler.stream = sys.__stderr__  # the captured one will be closed


@pytest.fixture
def script(monkeypatch, environment, token_cache, capfd) -> Callable[[str, list[str]], Ended]:
    """A function (name of a task's script, arguments) -> Ended."""
    import datasets
    import huggingface_hub

    from samerun import start
    from samerun.main import run_task
    from samerun.runtime import forget_accelerator

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(signals, "watch_launcher", lambda generations: None)

    def exit_now(code: int) -> NoReturn:
        raise ProcessExit(code)

    monkeypatch.setattr(signals, "exit_now", exit_now)

    def run(task: str, argv: list[str]) -> Ended:
        forget_accelerator()
        capfd.readouterr()
        file, code = next(f / f"{task}.py" for f in FOLDERS if (f / f"{task}.py").exists()), 0
        with default_logging() as messages:
            try:
                with failures_end_the_job(debug=shows_traces(argv)):
                    arguments, task_class = read_command(file, argv)
                    run_task(task_class(arguments), arguments)
            except ProcessExit as exit_:
                code = exit_.args[0]
        # A real exit would end the workers of a failed DataLoader, and close the lock.
        for worker in multiprocessing.active_children():
            worker.kill()
        start.unlock()
        out, err = capfd.readouterr()
        forget_accelerator()
        if code == 0:
            check_run_folder(Path(arguments.output_dir))
        return Ended(code, out, err + "".join(f"{message}\n" for message in messages))

    return run


def check_weights(ours: Path, theirs: Path, tolerance: float = TOLERANCE) -> None:
    """Checks that two files of weights, of `best/` or of a checkpoint, agree to 1e-5 of each tensor's largest
    number, or `tolerance`. Not the elements whose gradient is rounding alone, by the newest checkpoint of the
    second run."""
    checkpoints = theirs.parents[1] / "checkpoints" if theirs.parent.name == "best" else theirs.parents[1]
    newest = max(checkpoints.glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_")))
    found = weight_differences(load_file(ours), load_file(theirs), rounding_alone(read_gradients(newest)))
    worst = max(found, key=found.get)
    assert found[worst] <= tolerance, f"{worst}: {found[worst]:.1e}"


def check_evaluated_alike(trained: Path, evaluated: Path) -> None:
    """Checks that an evaluation without training has the metrics of the training's best model. Skips metrics
    with tuned thresholds: a training cross-fits the thresholds, an exported model stores them."""
    ours, theirs = (read_json(folder / "metrics.json") for folder in (trained, evaluated))
    numbers = {key: value for key, value in theirs.items() if key.startswith("eval_") and "tuned" not in key}
    assert {"eval_loss"} < numbers.keys() <= ours.keys()
    assert numbers == pytest.approx({key: ours[key] for key in numbers}, rel=0, abs=1e-6)
