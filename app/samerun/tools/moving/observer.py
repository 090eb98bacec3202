"""Records the rows and learning rates of each training step, the predictions of each evaluation, and random
numbers that are not by row.

Wraps functions of the application's modules when they are imported. Each process writes its own file, without
communication.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def observe_steps(folder: Path, stop_after: int = 0) -> None:
    """Records this process's training steps in FOLDER/NAME.rank_R.jsonl, where NAME is the name of the output
    folder. A line: {"step": from 0, "rows": of this process, in the order of its forward passes,
    "learning_rates": by parameter group}. `stop_after`: the process asks the run to stop after so many steps,
    and records what the modules compute in the first one (`samerun.tools.moving.activations`); 0: never."""
    _after_import("samerun.training", lambda engine: _observe(engine, folder, stop_after))


def read_steps(folder: Path, name: str, processes: int) -> dict[int, dict[str, Any]]:
    """Reads the files of a run: step -> {"rows": sorted rows of all processes, "learning_rates"}.

    Raises `ValueError` for a missing file and for learning rates that differ from rank 0.
    """
    steps: dict[int, dict[str, Any]] = {}
    for rank in range(processes):
        path = folder / f"{name}.rank_{rank}.jsonl"
        if not path.exists():
            raise ValueError(f"{path}: rank {rank} wrote nothing")
        # A resumed run may repeat steps; the last line of a step counts.
        with path.open(encoding="utf-8") as file:
            lines = {line["step"]: line for line in map(json.loads, file)}
        for number, line in lines.items():
            step = steps.setdefault(number, {"rows": [], "learning_rates": line["learning_rates"]})
            step["rows"] = sorted([*step["rows"], *line["rows"]])
            if step["learning_rates"] != line["learning_rates"]:
                raise ValueError(f"{path}: step {number} has other learning rates than on rank 0")
    return steps


def _observe(engine: ModuleType, folder: Path, stop_after: int) -> None:
    from samerun.tools.moving import activations, recorder  # import torch

    _record_steps(engine, folder, stop_after)
    if stop_after:
        activations.record(engine, folder)
    recorder.record_predictions(engine, folder)
    recorder.record_random_calls(engine, folder)


def _record_steps(engine: ModuleType, folder: Path, stop_after: int) -> None:
    fit, seed_step, train_step = engine.Training.fit, engine.seed_step, engine.train_step
    current: dict[str, Any] = {}  # "file" while `fit` runs, "step"

    def fit_observed(training: Any) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{training.folder.name}.rank_{training.run.launch.rank}.jsonl"
        with path.open("a", encoding="utf-8") as current["file"]:
            return fit(training)

    def seed_step_observed(seed: int, step: int, *rest: Any) -> None:
        current["step"] = step
        seed_step(seed, step, *rest)

    def train_step_observed(
        run: Any, model: Any, optimizer: Any, task: Any, micro_batches: list, *rest: Any, **named: Any
    ):
        if "file" in current:  # skips the idle step in which a resumed run allocates its optimizer state
            rows = [row for batch in micro_batches for row in batch.rows.tolist() if row >= 0]
            line = {
                "step": current["step"],
                "rows": rows,
                "learning_rates": [group["lr"] for group in optimizer.param_groups],
            }
            current["file"].write(json.dumps(line) + "\n")
            current["file"].flush()
            current["steps"] = current.get("steps", 0) + 1
            if current["steps"] == stop_after:
                signal.raise_signal(signal.SIGTERM)  # the engine finishes this step
        return train_step(run, model, optimizer, task, micro_batches, *rest, **named)

    engine.Training.fit = fit_observed
    engine.seed_step, engine.train_step = seed_step_observed, train_step_observed


def _after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    """Calls `change` on one module right after its regular import."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self.change(module)

        spec.loader.exec_module = execute_and_change
        return spec
