"""One optimizer step, the same under every launch.

The loss summed over a micro-batch is multiplied by (accumulation x processes / targets of the global batch).
Accelerate or DeepSpeed divides by the accumulation, DDP, ZeRO or FSDP by the processes. The result is the
gradient of the mean over the global batch, also for the incomplete last batch of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from samerun import deepspeed, fsdp, machines
from samerun.kernels.common import row_lengths
from samerun.reports.profiling import part
from samerun.runtime import Run
from samerun.task import Batch, Task
from samerun.training.splitting import Splitting

SYNCHRONOUS = ("cpu",)  # devices on which reading a result does not wait


def train_step(
    run: Run,
    model: Any,
    optimizer: Any,
    task: Task,
    micro_batches: list[Batch],
    max_grad_norm: float,
    *,
    weight: float = 1.0,
    splitting: Splitting | None = None,
    reseed: Callable[[], None] | None = None,
) -> tuple[torch.Tensor, Any]:
    """One optimizer step over this process's micro-batches of one global batch.

    Returns (this process's part of the global mean loss: the parts of all processes add up to it; the norm of
    the full gradient before clipping). `weight`: of the gradient; 0 makes it zero. `splitting`: splits
    micro-batches that do not fit into memory; `reseed`: called before the step is repeated for this, which
    needs it.
    """
    accelerator, splitting = run.accelerator, splitting or Splitting()
    dtype = input_dtype(run, model)
    batches = [batch.to(run.device, dtype) for batch in micro_batches]
    targets = run.sum(torch.stack([task.num_targets(batch) for batch in batches]).sum()).clamp(min=1)
    scale = weight * accelerator.gradient_accumulation_steps * run.launch.world_size / targets
    while True:
        try:
            loss = _accumulate(run, model, task, batches, scale, splitting)
            break
        except Exception as error:
            if reseed is None or not splitting.halve(run, model, batches, error):
                raise
        splitting.clear_step(run, optimizer)
        reseed()
    machines.progress()
    with part("optimizer"):
        norm = (
            deepspeed.grad_norm(model)
            if run.deepspeed_config is not None
            else _clip(run, model, max_grad_norm or math.inf)
        )
        optimizer.step()
        optimizer.zero_grad()
    return loss / targets, norm


def _accumulate(
    run: Run, model: Any, task: Task, batches: list[Batch], scale: torch.Tensor, splitting: Splitting
) -> torch.Tensor:
    """Accumulates the gradients of `scale` times the summed loss; returns the summed loss."""
    accelerator, loss = run.accelerator, torch.zeros((), device=run.device)
    is_ddp = isinstance(model, DistributedDataParallel)
    parts = splitting.parts(batches, run)
    for position, batch in enumerate(parts):
        last, splitting.exchanging = position == len(parts) - 1, False
        # Not `accumulate()`: it relies on the dataloader's end, which is wrong when batches are prefetched.
        accelerator.sync_gradients = last
        # DDP's exchange is prepared after the last forward pass instead of in it, so that the step can be
        # repeated until then.
        with nullcontext() if last and not is_ddp else accelerator.no_sync(model):
            with part("forward"), row_lengths(batch.lengths):
                loss_sum = task.loss_sum(model, batch)
            machines.progress()
            splitting.exchanging = last and run.launch.world_size > 1
            with part("backward"), accelerator.trigger_sync_in_backward(model) if last else nullcontext():
                accelerator.backward(loss_sum * scale)
        loss += loss_sum.detach().float()
    return loss


def _clip(run: Run, model: Any, max_norm: float) -> torch.Tensor:
    """Clips gradients and returns their norm before. `Accelerator.clip_grad_norm_` always multiplies all
    gradients, if only by 1, so that the host need not wait for a GPU's norm. On a CPU this pass is skipped if
    the norm is small."""
    if run.device.type not in SYNCHRONOUS:
        return fsdp.full_tensor(run.accelerator.clip_grad_norm_(model.parameters(), max_norm))
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = fsdp.full_tensor(torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
    if not norm <= max_norm:  # true for NaN
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def input_dtype(run: Run, model: torch.nn.Module) -> torch.dtype | None:
    """The dtype of a model's inputs: that of its weights, which DeepSpeed keeps in half precision. Under FSDP
    fp32, although gathered weights may be in half precision."""
    if run.fsdp is not None:
        return torch.float32
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Makes dropout a function of (seed, step, rank), so that checkpoints need no random state."""
    number = int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:  # saves 0.2 ms: manual_seed visits every kind of device
        torch.default_generator.manual_seed(number)
