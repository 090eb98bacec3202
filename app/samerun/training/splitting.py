"""Splits micro-batches that do not fit into memory, and repeats the step.

The loss is a sum, normalised over the global batch, so a step in more parts is the same up to round-off. Only
the dropout sample changes, as it does with the number of processes.

A process splits its micro-batches without asking the others. This works in a single process, and under DDP
until the backward pass that exchanges gradients. It does not work under DeepSpeed and FSDP, which exchange in
every pass, nor with batch norm, whose statistics depend on the micro-batch. DeepSpeed and FSDP go on
splitting if they resume a run that did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.utils.memory import clear_device_cache
from torch.nn.parallel import DistributedDataParallel

from samerun.errors import is_out_of_memory
from samerun.layers import has_statistics
from samerun.runtime import Run
from samerun.task import Batch

MOST_HALVINGS = 16


@dataclass
class Splitting:
    """Splits each micro-batch of a process into 2 ** `halvings` parts."""

    halvings: int = 0
    exchanging: bool = False  # whether this step has begun to exchange gradients with other processes

    def parts(self, batches: list[Batch], run: Run) -> list[Batch]:
        """The parts of all batches. Under DeepSpeed and FSDP, every process gets the same number, some of
        them placeholders."""
        parts, exchanges = 2**self.halvings, run.deepspeed_config is not None or run.fsdp is not None
        return [part for batch in batches for part in _parts(batch, parts, filled=exchanges)]

    def halve(self, run: Run, model: Any, batches: list[Batch], error: Exception) -> bool:
        """Halves the parts if `error` is an out-of-memory error and the step can be repeated; otherwise
        returns False."""
        most_rows = max(math.ceil(len(batch.rows) / 2**self.halvings) for batch in batches)
        alone = run.launch.world_size == 1 and run.deepspeed_config is None and run.fsdp is None
        local = (alone or isinstance(model, DistributedDataParallel)) and not self.exchanging
        divisible = (
            most_rows > 1 and self.halvings < MOST_HALVINGS and not any(map(has_statistics, model.modules()))
        )
        if not (is_out_of_memory(error) and local and divisible):
            return False
        self.halvings += 1
        return True

    def clear_step(self, run: Run, optimizer: Any) -> None:
        """Frees the aborted step's memory. Call it outside of the `except` block, which keeps tensors
        alive."""
        run.accelerator.sync_gradients = True  # otherwise Accelerate's optimizer keeps the gradients
        optimizer.zero_grad()
        clear_device_cache(garbage_collection=True)


def _parts(batch: Batch, count: int, filled: bool) -> Iterator[Batch]:
    """At most `count` parts, each of at least one row; with `filled`, placeholders up to `count`."""
    rows = len(batch.rows)
    size = math.ceil(rows / count)
    for first in range(0, rows, size):
        yield batch if size == rows else batch[first : first + size]
    if filled:
        yield from [batch.placeholder()] * (count - math.ceil(rows / size))
