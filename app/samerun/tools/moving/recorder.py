"""What `observer` records of a run besides its steps: predictions, and random numbers that are not by row."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from samerun.kernels import dropout

OURS = ("/torch/", "/samerun/")  # of a file's path: the line that matters is outside of these


def record_predictions(engine: ModuleType, folder: Path) -> None:
    """Records the floating-point predictions of each evaluation, such as logits, in
    FOLDER/NAME.predictions_STEP.npz."""
    of_training, evaluate = engine.Training._evaluate, engine.evaluate
    current: dict[str, Any] = {}

    def evaluate_of_training(training: Any) -> Any:
        current["name"] = f"{training.folder.name}.predictions_{training.state.step}.npz"
        return of_training(training)

    def evaluate_observed(*inputs: Any, **named: Any) -> tuple[Any, Any]:
        metrics, predictions = evaluate(*inputs, **named)
        if predictions is not None:  # on rank 0
            floats = {name: array for name, array in predictions.items() if array.dtype.kind == "f"}
            np.savez(folder / current["name"], **floats)
        return metrics, predictions

    engine.Training._evaluate, engine.evaluate = evaluate_of_training, evaluate_observed


def read_predictions(folder: Path, name: str) -> dict[int, dict[str, np.ndarray]]:
    """Step from 1 -> predictions by name."""
    files = folder.glob(f"{name}.predictions_*.npz")
    return {int(path.stem.rpartition("_")[2]): dict(np.load(path)) for path in files}


def record_random_calls(engine: ModuleType, folder: Path) -> None:
    """Records which lines of code draw random tensors that are not by row, in the first step of a run of one
    process with dropout by row: FOLDER/NAME.random.txt."""
    fit, train_step = engine.Training.fit, engine.train_step
    current: dict[str, Any] = {}

    def fit_observed(training: Any) -> Any:
        launch = training.run.launch
        if launch.world_size == 1 and launch.dropout_by_row:
            current["path"] = folder / f"{training.folder.name}.random.txt"
        return fit(training)

    def train_step_observed(*inputs: Any, **named: Any) -> Any:
        if "path" not in current:
            return train_step(*inputs, **named)
        watch, path = RandomCalls(), current.pop("path")
        of_other_layout = dropout.DropoutMask.keys_of_other_layout
        dropout.DropoutMask.keys_of_other_layout = lambda mask: watch.keys_of_other_layout(mask)
        try:
            with watch:
                return train_step(*inputs, **named)
        finally:
            dropout.DropoutMask.keys_of_other_layout = of_other_layout
            path.write_text("".join(f"{place}\n" for place in sorted(watch.places)), encoding="utf-8")

    engine.Training.fit, engine.train_step = fit_observed, train_step_observed


def read_random_calls(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.random.txt"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


class RandomCalls(TorchDispatchMode):
    """Collects the lines of code that draw random tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Dropout by row draws a single number.
        tensors = [tensor for tensor in tree_iter(result) if isinstance(tensor, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags and any(x.numel() > 1 for x in tensors):
            self.add(func.overloadpacket.__name__)
        return result

    def add(self, what: str) -> None:
        stack = traceback.extract_stack()
        frames = [frame for frame in stack if not any(part in frame.filename for part in OURS)] or stack
        self.places.add(f"{Path(frames[-1].filename).name}:{frames[-1].lineno} ({what})")

    def keys_of_other_layout(self, mask: Any) -> Any:
        self.add("dropout of a tensor whose first dimension is not of rows")
        return mask.keys([dropout.OTHER + mask.places[0]])
