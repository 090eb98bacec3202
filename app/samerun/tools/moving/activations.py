"""What each module of a model computes for each row in one training step, to find the first module that two
setups compute differently."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch

WRAPPERS = ("module.", "_checkpoint_wrapped_module.", "_orig_mod.")  # of DDP, checkpointing, torch.compile


def read(folder: Path, name: str) -> dict[str, dict[str, float]]:
    """The records of all processes of a run."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob(f"{name}.activations.rank_*.json")):
        for module, rows in json.loads(path.read_text(encoding="utf-8")).items():
            found.setdefault(module, {}).update(rows)
    return found


def first_difference(
    ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]], tolerance: float
) -> tuple[str, str, float] | None:
    """(module, row, difference relative to the larger norm) of the first module, in the order of `theirs`,
    some of whose rows differ by more than `tolerance`; of the row that differs most. None without one."""
    for module, rows in theirs.items():
        worst = max(
            (
                (_relative(ours[module][row], norm), row)
                for row, norm in rows.items()
                if row in ours.get(module, {})
            ),
            default=(0.0, ""),
        )
        if worst[0] > tolerance:
            return module, worst[1], worst[0]
    return None


def _relative(ours: float, theirs: float) -> float:
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return 0.0 if str(ours) == str(theirs) else math.inf
    return abs(ours - theirs) / max(abs(ours), abs(theirs), 1e-30)


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
        if self.batch is None or tensor.dim() == 0 or len(tensor) != len(self.batch.rows):
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
