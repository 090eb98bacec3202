"""What `observer` records of a run."""

from __future__ import annotations

import json
import signal
import traceback
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from samerun.kernels import dropout

OURS = ("/torch/", "/samerun/")  # of a file's path: the line that matters is outside of these


def record(engine: ModuleType, folder: Path, stop_after: int = 0) -> None:
    """Wraps functions of `engine`, `samerun.training`. Records the steps (`observer.observe_steps`); the
    floating-point predictions of each evaluation, such as logits, in FOLDER/NAME.predictions_STEP.npz; and in
    FOLDER/NAME.random.txt which lines of code draw random tensors that are not by row, in the first step of a
    run of one process with dropout by row. `stop_after`: see `observer.observe_steps`."""
    fit, evaluate_of_training = engine.Training.fit, engine.Training._evaluate
    seed_step, train_step, evaluate = engine.seed_step, engine.train_step, engine.evaluate
    current: dict[str, Any] = {}  # "file" and "random" while `fit` runs, "step", "steps", "predictions"

    def fit_observed(training: Any) -> Any:
        launch, name = training.run.launch, training.folder.name
        folder.mkdir(parents=True, exist_ok=True)
        if launch.world_size == 1 and launch.dropout_by_row:
            current["random"] = folder / f"{name}.random.txt"
        with (folder / f"{name}.rank_{launch.rank}.jsonl").open("a", encoding="utf-8") as current["file"]:
            return fit(training)

    def evaluate_of_training_observed(training: Any) -> Any:
        name = f"{training.folder.name}.predictions_{training.state.step}.npz"
        current["predictions"] = folder / name
        return evaluate_of_training(training)

    def evaluate_observed(*inputs: Any, **named: Any) -> tuple[Any, Any]:
        metrics, predictions = evaluate(*inputs, **named)
        if predictions is not None:  # on rank 0
            floats = {name: array for name, array in predictions.items() if array.dtype.kind == "f"}
            np.savez(current["predictions"], **floats)
        return metrics, predictions

    def seed_step_observed(seed: int, step: int, *rest: Any) -> None:
        current["step"] = step
        seed_step(seed, step, *rest)

    def train_step_observed(
        run: Any, model: Any, optimizer: Any, task: Any, micro_batches: list, *rest: Any, **named: Any
    ):
        if "file" in current:  # skips the idle step in which a resumed run allocates its optimizer state
            rows = [row for batch in micro_batches for row in batch.rows.tolist() if row >= 0]
            rates = [group["lr"] for group in optimizer.param_groups]
            line = {"step": current["step"], "rows": rows, "learning_rates": rates}
            current["file"].write(json.dumps(line) + "\n")
            current["file"].flush()
            current["steps"] = current.get("steps", 0) + 1
            if current["steps"] == stop_after:
                signal.raise_signal(signal.SIGTERM)  # the engine finishes this step
        step = partial(train_step, run, model, optimizer, task, micro_batches, *rest, **named)
        return _watched(step, current.pop("random")) if "random" in current else step()

    engine.Training.fit, engine.Training._evaluate = fit_observed, evaluate_of_training_observed
    engine.seed_step, engine.train_step = seed_step_observed, train_step_observed
    engine.evaluate = evaluate_observed


def _watched(step: partial, path: Path) -> Any:
    """Writes the lines of code that draw random tensors in this step to `path`."""
    watch, of_other_layout = RandomCalls(), dropout.DropoutMask.keys_of_other_layout
    dropout.DropoutMask.keys_of_other_layout = lambda mask: watch.keys_of_other_layout(mask)
    try:
        with watch:
            return step()
    finally:
        dropout.DropoutMask.keys_of_other_layout = of_other_layout
        path.write_text("".join(f"{place}\n" for place in sorted(watch.places)), encoding="utf-8")


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
