"""One optimizer step, the same under every launch.

The loss summed over a micro-batch is multiplied by (accumulation x processes / targets in the whole global batch). Accelerate
or DeepSpeed divides by the accumulation, DDP, ZeRO or FSDP by the processes, and what is left is the gradient of the mean over
the global batch, the incomplete last batch of an epoch included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from finetune.kernels.row_lengths import row_lengths
from finetune.launching import deepspeed_state, fsdp_state, heartbeat
from finetune.launching.processes import Run
from finetune.reports.profiling import part
from finetune.task import Batch, Task
from finetune.training.splitting import Splitting

READY = ("cpu",)  # devices whose results are there as soon as they are asked for


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

    Returns (this process's share of the mean loss: the sum over processes is the mean over the global batch's targets; the
    norm of the full gradient before clipping). `weight` 0 makes a step whose gradient is zero. `splitting` cuts micro-batches
    that do not fit into memory; `reseed` is called before the step begins again.
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
            if reseed is None or not splitting.cut_further(run, model, batches, error):
                raise
        splitting.begin_again(run, optimizer)
        reseed()
    heartbeat.progress()
    with part("optimizer"):
        norm = (
            deepspeed_state.grad_norm(model)
            if run.deepspeed_config is not None
            else _clip(run, model, max_grad_norm or math.inf)
        )
        optimizer.step()
        optimizer.zero_grad()
    return loss / targets, norm


def _accumulate(
    run: Run, model: Any, task: Task, batches: list[Batch], scale: torch.Tensor, splitting: Splitting
) -> torch.Tensor:
    """Adds the gradient of `scale` times the summed loss; returns that sum."""
    accelerator, loss = run.accelerator, torch.zeros((), device=run.device)
    is_ddp = isinstance(model, DistributedDataParallel)
    parts = splitting.parts(batches)
    for position, batch in enumerate(parts):
        last, splitting.exchanges = position == len(parts) - 1, False
        # Set by hand: `accumulate()` asks the dataloader where it ends, and steps at the wrong place when we fetch ahead.
        accelerator.sync_gradients = last
        # DDP prepares its exchange behind the last forward pass, so that the step can begin again until then.
        with nullcontext() if last and not is_ddp else accelerator.no_sync(model):
            with part("forward"), row_lengths(batch.lengths):
                loss_sum = task.loss_sum(model, batch)
            heartbeat.progress()
            splitting.exchanges = last and run.launch.world_size > 1
            with part("backward"), accelerator.trigger_sync_in_backward(model) if last else nullcontext():
                accelerator.backward(loss_sum * scale)
        loss += loss_sum.detach().float()
    return loss


def _clip(run: Run, model: Any, max_norm: float) -> torch.Tensor:
    """`Accelerator.clip_grad_norm_`, which multiplies every gradient by 1 where the norm is not above `max_norm`: a GPU is not
    asked for it. On a CPU nothing waits for the answer, and another pass over the gradients can be spared."""
    if run.device.type not in READY:
        return fsdp_state.full_tensor(run.accelerator.clip_grad_norm_(model.parameters(), max_norm))
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = fsdp_state.full_tensor(torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
    if not norm <= max_norm:  # nor where it is no number
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def input_dtype(run: Run, model: torch.nn.Module) -> torch.dtype | None:
    """The precision in which a model takes inputs: that of its weights, which DeepSpeed keeps in half precision. FSDP's are in
    it only while they are gathered."""
    if run.fsdp is not None:
        return torch.float32
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Makes dropout a function of (seed, step, rank): no random state to save, and none to lose."""
    number = int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:  # the same without asking every kind of device, which formats stack traces: 0.2 ms
        torch.default_generator.manual_seed(number)
