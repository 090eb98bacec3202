"""What the engine relies on in a task of one's own, tried on two rows before the first step."""

import math
import random
from typing import Any

import numpy as np
import torch

from samerun.errors import InputError, StopRequested, TrainingError, in_short
from samerun.evaluate import input_dtype
from samerun.kernels.dropout import dropout_by_row
from samerun.runtime import Run
from samerun.task import Batch, Task

# Of a loss: above the rounding of fp32, and of bf16, fp16 and TF32.
TOLERANCE, ROUNDED_TOLERANCE = 1e-4, 0.02
SAME = 1e-5  # of a number of targets, which may be a sum of weights


@torch.no_grad()
def losses_add_up(run: Run, model: Any, task: Task, batch: Batch) -> bool:
    """Whether the loss of two rows is the sum of their own losses; prints a note if not, or if it cannot be
    tried. All processes must call it, with the same rows, as ZeRO-3 and FSDP gather weights. Leaves the model
    in evaluation mode.

    Raises `TrainingError` for losses or numbers of targets that the engine cannot add up, for placeholders
    that count, and for tensors without a row dimension.
    """
    rows = len(batch.rows)
    for name, tensor in {**batch.inputs, "labels": batch.labels}.items():
        if tensor is not None and tensor.shape[:1] != (rows,):
            shape = tuple(tensor.shape)
            raise TrainingError(f"collate: {name} has the shape {shape}, expected ({rows}, ...)")
    model.eval()
    parts = (batch[:2], batch[:1], batch[1:2] if rows > 1 else batch[:1], batch.placeholder())
    reason = None
    try:
        with torch.compiler.set_stance("force_eager"):  # no step has these shapes
            losses, targets = zip(*(_numbers(run, model, task, part) for part in parts), strict=True)
    except (TrainingError, InputError, StopRequested):
        raise
    except Exception as error:  # a loss may need gradients inside, or outputs of the training mode
        reason = f"{type(error).__name__}: {in_short(error)}"
    if run.any(reason is not None):
        reason = reason or "another rank"
        run.print(f"note           loss_sum is not tried on two rows in evaluation mode ({reason})")
        return True
    if losses[3] != 0 or targets[3] != 0:
        raise TrainingError(
            f"a placeholder has loss {losses[3]:g} and {targets[3]:g} targets, expected 0 and 0: loss_sum "
            "and num_targets must leave out rows whose batch.is_real is false"
        )
    if targets[0] < 0 or (targets[0] == 0 and losses[0] != 0):
        raise TrainingError(f"num_targets: {targets[0]:g} for rows with a loss of {losses[0]:g}")
    if rows < 2:
        return True
    if not math.isclose(targets[0], targets[1] + targets[2], rel_tol=SAME):
        raise TrainingError(f"num_targets: {targets[0]:g} for two rows, {targets[1:3]} for each of them")
    exact = run.launch.precision == "no" and not run.launch.tf32
    tolerance = TOLERANCE if exact else ROUNDED_TOLERANCE
    differs = abs(losses[0] - losses[1] - losses[2]) > tolerance * (abs(losses[1]) + abs(losses[2]))
    if not run.any(differs):
        return True
    run.print(
        f"note           loss_sum of two rows is {losses[0]:.6g}, of each alone {losses[1]:.6g} and "
        f"{losses[2]:.6g}: if it is a mean, make it a sum; if it couples rows, other processes or "
        "micro-batches train otherwise"
    )
    return False


def _numbers(run: Run, model: Any, task: Task, batch: Batch) -> tuple[float, float]:
    """(loss, number of targets) of a batch."""
    batch = batch.to(run.device, input_dtype(run, model))
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # a loss may draw
        seed(0)
    with dropout_by_row(batch.lengths, batch.places):
        values = {"loss_sum": task.loss_sum(model, batch), "num_targets": task.num_targets(batch)}
    for method, value in values.items():
        if getattr(value, "shape", None) != ():
            found = getattr(value, "shape", type(value).__name__)
            raise TrainingError(f"{method}: gives {found}, expected a tensor of shape ()")
    return float(values["loss_sum"]), float(values["num_targets"])
