"""Records the rows and learning rates of each training step.

The application does not know of it: its modules are wrapped when they are imported. Each process
writes a file of its own, so nothing is exchanged between processes that they would not exchange anyway.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def observe_steps(folder: Path) -> None:
    """Has this process write FOLDER/NAME.rank_R.jsonl, a line per training step, where NAME is that of the output folder:
    {"step": from 0, "rows": of this process, in the order of its forward passes, "learning_rates": of each parameter group}.
    """
    _after_import("finetune.training.loop", lambda engine: _record_steps(engine, folder))


def switch_dropout_off() -> None:
    """Makes the model that is trained drop nothing, wherever its architecture keeps its probabilities."""
    _after_import("finetune.training_setup", _train_without_dropout)


def read_steps(folder: Path, name: str, processes: int) -> dict[int, dict[str, Any]]:
    """What the processes of a run wrote: step -> {"rows": of all of them, sorted; "learning_rates": as all have them}.

    Raises `ValueError` if a process wrote nothing or others' learning rates differ from the first one's.
    """
    found: dict[int, dict[str, Any]] = {}
    for rank in range(processes):
        path = folder / f"{name}.rank_{rank}.jsonl"
        if not path.exists():
            raise ValueError(f"{path}: rank {rank} wrote nothing")
        # A run that was stopped and goes on may make a step again; the last time counts.
        lines = {line["step"]: line for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
        for step, line in lines.items():
            known = found.setdefault(step, {"rows": [], "learning_rates": line["learning_rates"]})
            known["rows"] = sorted([*known["rows"], *line["rows"]])
            if known["learning_rates"] != line["learning_rates"]:
                raise ValueError(f"{path}: step {step} has other learning rates than on rank 0")
    return found


def _record_steps(engine: ModuleType, folder: Path) -> None:
    fit, seed_step, train_step = engine.fit, engine.seed_step, engine.train_step
    place: dict[str, Any] = {}

    def fit_observed(run: Any, training: Any, state: Any) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{training.output_dir.name}.rank_{run.launch.rank}.jsonl"
        with path.open("a", encoding="utf-8") as place["file"]:
            return fit(run, training, state)

    def seed_step_observed(seed: int, step: int, rank: int) -> None:
        place["step"] = step
        seed_step(seed, step, rank)

    def train_step_observed(run: Any, model: Any, optimizer: Any, task: Any, micro_batches: list, *rest: Any, **named: Any):
        if "file" in place:  # not the idle step by which a resumed run makes room for its moments
            rows = [row for batch in micro_batches for row in batch.rows.tolist() if row >= 0]
            line = {"step": place["step"], "rows": rows, "learning_rates": [group["lr"] for group in optimizer.param_groups]}
            place["file"].write(json.dumps(line) + "\n")
            place["file"].flush()
        return train_step(run, model, optimizer, task, micro_batches, *rest, **named)

    engine.fit, engine.seed_step, engine.train_step = fit_observed, seed_step_observed, train_step_observed


def _train_without_dropout(setup: ModuleType) -> None:
    prepare = setup.prepare_training

    def prepare_without_dropout(*inputs: Any, **named: Any) -> Any:
        zero_probabilities(inputs[5])  # the model
        return prepare(*inputs, **named)

    setup.prepare_training = prepare_without_dropout


def zero_probabilities(model: Any) -> None:
    """Sets every dropout probability of a built model to 0: of `nn.Dropout` modules, of attributes such as BART's `dropout`
    and `layerdrop`, and of the configurations, which some models ask in their forward pass."""
    for module in model.modules():
        configs = [value for name, value in vars(module).items() if name.endswith("config") and hasattr(value, "__dict__")]
        for holder in (module, *configs):
            for name, value in list(vars(holder).items()):
                is_probability = "drop" in name or (name == "p" and "Drop" in type(holder).__name__)
                if is_probability and isinstance(value, float):
                    setattr(holder, name, 0.0)


def _after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the import system load one module as it would, and changes it then."""

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
