"""What `observer` records of a run."""

import contextlib
import json
import signal
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from samerun.kernels import dropout

WRAPPERS = ("module.", "_checkpoint_wrapped_module.", "_orig_mod.")  # of DDP, checkpointing, torch.compile
OURS = ("/torch/", "/samerun/")  # of a file's path: the line that matters is outside of these


def record(engine: ModuleType, folder: Path, stop_after: int = 0) -> None:
    """Wraps functions of `engine`, `samerun.training`. Records the steps (`observer.observe_steps`) and the
    floating-point predictions of each evaluation, such as logits, in FOLDER/NAME.predictions_STEP.npz. In the
    first step also, in FOLDER/NAME.random.txt, which lines of code draw random tensors that are not by row,
    in a run of one process with dropout by row; and with `stop_after` (see there) what the modules compute,
    in FOLDER/NAME.activations.rank_R.json."""
    fit, train_step, evaluate = engine.Training.fit, engine.train_step, engine.evaluate
    current: dict[str, Any] = {}  # while `fit` runs

    def fit_observed(training: Any) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        current["training"], current["steps"] = training, 0
        path = folder / f"{training.folder.name}.rank_{training.run.launch.rank}.jsonl"
        with path.open("a", encoding="utf-8") as current["file"]:
            return fit(training)

    def evaluate_observed(*inputs: Any, **named: Any) -> tuple[Any, Any]:
        metrics, predictions = evaluate(*inputs, **named)
        if predictions is not None:  # on rank 0
            training = current["training"]
            floats = {name: array for name, array in predictions.items() if array.dtype.kind == "f"}
            np.savez(folder / f"{training.folder.name}.predictions_{training.state.step}.npz", **floats)
        return metrics, predictions

    def train_step_observed(
        run: Any, model: Any, optimizer: Any, task: Any, micro_batches: list, *rest: Any, **named: Any
    ):
        step = partial(train_step, run, model, optimizer, task, micro_batches, *rest, **named)
        if "training" not in current:  # the idle step in which a resumed run allocates its optimizer state
            return step()
        training = current["training"]
        rows = [row for batch in micro_batches for row in batch.rows.tolist() if row >= 0]
        rates = [group["lr"] for group in optimizer.param_groups]
        line = {"step": training.state.step, "rows": rows, "learning_rates": rates}
        current["file"].write(json.dumps(line) + "\n")
        current["file"].flush()
        current["steps"] += 1
        if current["steps"] == stop_after:
            signal.raise_signal(signal.SIGTERM)  # the engine finishes this step
        launch, name = training.run.launch, training.folder.name
        with contextlib.ExitStack() as watches:
            if current["steps"] == 1 and stop_after:
                path = folder / f"{name}.activations.rank_{launch.rank}.json"
                watches.enter_context(Watch(model, task, path))
            if current["steps"] == 1 and launch.world_size == 1 and launch.dropout_by_row:
                watches.enter_context(RandomCalls(folder / f"{name}.random.txt"))
            return step()

    engine.Training.fit = fit_observed
    engine.train_step, engine.evaluate = train_step_observed, evaluate_observed


class RandomCalls(TorchDispatchMode):
    """Writes the lines of code that draw random tensors while it is entered to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.places: set[str] = set()

    def __enter__(self) -> Any:
        self.keys = dropout.DropoutMask.keys_of_other_layout
        dropout.DropoutMask.keys_of_other_layout = lambda mask: self.keys_of_other_layout(mask)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        dropout.DropoutMask.keys_of_other_layout = self.keys
        self.path.write_text("".join(f"{place}\n" for place in sorted(self.places)), encoding="utf-8")

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


class Watch:
    """A context manager that records the forward passes of a training step in a file: "MODULE CALL" -> row ->
    norm of the module's output for the row, without padding, in the order of the passes. Outputs whose first
    dimension is not of rows are left out."""

    def __init__(self, model: torch.nn.Module, task: Any, path: Path) -> None:
        self.model, self.task, self.path = model, task, path
        self.found: dict[str, dict[str, float]] = {}
        self.batch: Any = None
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> None:
        self.loss_sum, self.task.loss_sum = self.task.loss_sum, self._loss_sum
        self.hooks = [
            module.register_forward_hook(lambda _module, _inputs, output, name=name: self._add(name, output))
            for name, module in self.model.named_modules()
        ]

    def __exit__(self, *_: Any) -> None:
        self.task.loss_sum = self.loss_sum
        for hook in self.hooks:
            hook.remove()
        self.path.write_text(json.dumps(self.found), encoding="utf-8")

    def _loss_sum(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.batch = batch
        self.calls.clear()
        try:
            return self.loss_sum(model, batch)
        finally:
            self.batch = None  # gradient checkpointing computes modules again in the backward pass

    def _add(self, name: str, output: Any) -> None:
        tensor = output
        while not isinstance(tensor, torch.Tensor):
            if isinstance(tensor, dict):
                tensor = list(tensor.values())
            if not isinstance(tensor, list | tuple) or not tensor:
                return
            tensor = tensor[0]
        of_one_token = tensor.dim() == 3 and tensor.shape[1] == 1  # of all on a GPU: `kernels.last_layer`
        if self.batch is None or of_one_token or tensor.dim() == 0 or len(tensor) != len(self.batch.rows):
            return
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        self.calls[name] += 1
        values = tensor.detach().double()
        mask = self.batch.inputs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and values.dim() > 1 and values.shape[1] == mask.shape[1]:
            values = values * mask.view(*mask.shape, *[1] * (values.dim() - 2))
        norms = values.flatten(1).norm(dim=1).tolist() if values.dim() > 1 else values.abs().tolist()
        rows = self.found.setdefault(f"{name or 'model'} {self.calls[name]}", {})
        rows.update(
            {str(row): norm for row, norm in zip(self.batch.rows.tolist(), norms, strict=True) if row >= 0}
        )
