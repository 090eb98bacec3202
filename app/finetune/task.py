"""What a task is to the engine: four verbs over batches. Level 2."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from finetune.errors import InputError
from finetune.reading.problems import nearest

Record = dict[str, Any]  # one row's prediction: "row" (its number in the file) and whatever the task scores


@dataclass(frozen=True)
class Batch:
    """Rows collated to tensors.

    `rows`: (b,) int64, each row's number in its file; -1 marks a placeholder, which takes part in the forward pass so that
    every process does the same number of them, and counts for nothing. `lengths`: tokens of each row, which begin it, for who
    leaves padding out (`finetune.kernels.row_lengths`); None if they do not begin it, or if that means nothing.
    """

    rows: torch.Tensor
    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def is_real(self) -> torch.Tensor:
        """(b,) bool: False for placeholders."""
        return self.rows >= 0

    def to(self, device: torch.device) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, move: Any) -> Batch:
        labels = None if self.labels is None else move(self.labels)
        return Batch(move(self.rows), {name: move(tensor) for name, tensor in self.inputs.items()}, labels, self.lengths)


class Task(Protocol):
    """A task is four verbs and the name of the score that decides which model is best.

    A loss is a sum and a count, so that its mean can be taken over the whole global batch: `num_targets` is asked before the
    first backward pass, because gradients cannot be rescaled once DeepSpeed has stepped inside the last one.
    """

    headline: str

    def num_targets(self, batch: Batch) -> torch.Tensor:
        """() int64: how many targets (labels, tokens, voxels) of this batch the loss is a mean over."""
        ...

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        """() float32: the loss summed over those targets."""
        ...

    def predict(self, model: Any, batch: Batch) -> list[Record]:
        """One record per real row of the batch, on the CPU, ready to be gathered."""
        ...

    def score(self, records: list[Record]) -> dict[str, float | None]:
        """The figures of a whole file from its records in the file's order; None where a figure is undefined."""
        ...


def check_figure(name: str, figures: Collection[str]) -> None:
    """Raises `InputError` for a --metric_for_best_model that is none of a task's figures."""
    if name not in figures:
        near = nearest(name, list(figures))
        hint = f"; did you mean {near}?" if near else "."
        raise InputError(f"--metric_for_best_model {name}: no such figure{hint} They are {', '.join(figures)}")
