"""Micro-batches that do not fit into memory are cut into parts.

The loss is a sum and its mean is taken over the global batch, so that a step in more parts is the same step up to round-off;
dropout draws another sample, as it does on another number of processes. The step begins again with an empty gradient.

It does so where the other processes need not know of it: in one process, and under DDP up to the backward pass that exchanges
gradients. It does not in that pass, under DeepSpeed and FSDP, which exchange in every pass, with batch norm, whose statistics
are those of a micro-batch, and for a single row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.utils.memory import clear_device_cache
from torch.nn.parallel import DistributedDataParallel

from finetune.errors import is_out_of_memory
from finetune.launching.processes import Run
from finetune.task import Batch
from finetune.training.gradient_checkpointing import has_statistics

MOST_HALVINGS = 16


@dataclass
class Splitting:
    """How the micro-batches of a process are cut: each into 2 ** `halvings` parts."""

    halvings: int = 0
    exchanges: bool = False  # whether the gradients of this step are on their way to other processes

    def parts(self, batches: list[Batch]) -> list[Batch]:
        """The batches, cut; none with fewer than one row."""
        return [part for batch in batches for part in _parts(batch, 2**self.halvings)]

    def cut_further(self, run: Run, model: Any, batches: list[Batch], error: Exception) -> bool:
        """Halves the parts after `error`, if it is one of memory and the step can begin again; else returns False."""
        most_rows = max(math.ceil(len(batch.rows) / 2**self.halvings) for batch in batches)
        alone = run.launch.world_size == 1 and run.deepspeed_config is None and run.fsdp is None
        local = (alone or isinstance(model, DistributedDataParallel)) and not self.exchanges
        divisible = most_rows > 1 and self.halvings < MOST_HALVINGS and not any(map(has_statistics, model.modules()))
        if not (is_out_of_memory(error) and local and divisible):
            return False
        self.halvings += 1
        return True

    def begin_again(self, run: Run, optimizer: Any) -> None:
        """Gives back what the aborted step holds. Call it outside of the `except` block, which keeps its tensors alive."""
        run.accelerator.sync_gradients = True  # without it Accelerate's optimizer keeps the gradients
        optimizer.zero_grad()
        clear_device_cache(garbage_collection=True)


def _parts(batch: Batch, count: int) -> Iterator[Batch]:
    rows = len(batch.rows)
    size = math.ceil(rows / count)
    for first in range(0, rows, size):
        yield batch if size == rows else batch[first : first + size]
