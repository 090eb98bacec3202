"""Evaluation and prediction. Every row of a file counts exactly once, whatever the number of processes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from samerun.data.batches import EvalRows
from samerun.errors import StopRequested, TrainingError, in_short, is_out_of_memory
from samerun.kernels.common import row_lengths
from samerun.output.progress import Phase
from samerun.runtime import Run
from samerun.signals import stop_requested
from samerun.task import Batch, Predictions, Task
from samerun.training.partial_predictions import Part, PartialPredictions
from samerun.training.step import input_dtype


def evaluate(
    run: Run, model: Any, task: Task, rows: EvalRows, stoppable: bool = False
) -> tuple[dict[str, float | None], Predictions | None]:
    """Evaluates all rows. Returns (metrics, on every process; predictions, None except on rank 0)."""
    predictions, _ = predict(run, model, task, rows, stoppable, label="evaluating")
    with Phase("scoring", shown=run.is_main):
        return run.on_main(lambda: task.all_scores(predictions, rows.split)), predictions


@torch.no_grad()
def predict(
    run: Run,
    model: Any,
    task: Task,
    rows: EvalRows,
    stoppable: bool = False,
    *,
    label: str = "predicting",
    saved_parts: PartialPredictions | None = None,
) -> tuple[Predictions | None, float]:
    """Predicts all rows. Returns (`Task.predict`'s arrays in the file's order, None except on rank 0; rows
    per second). `label`: for the progress bar; `saved_parts`: parts to resume from, and to add to.

    Raises `StopRequested` after a batch if `stoppable` and any process was requested to stop, and
    `TrainingError` if a row is missing or duplicated.
    """
    started = time.perf_counter()
    was_training, dtype = model.training, input_dtype(run, model)
    model.eval()
    numbers: list[torch.Tensor] = []  # rows of this process that are not gathered yet; likewise `arrays`
    arrays: list[dict[str, torch.Tensor]] = []
    parts, first, before = [], 0, 0
    if saved_parts is not None:
        parts, first, before = saved_parts.parts, saved_parts.num_batches, saved_parts.num_rows
    processes, done = run.launch.world_size, before
    with Phase(label, "rows", len(rows), before, shown=run.is_main) as phase:
        for num_batches, batch in enumerate(rows.batches(processes, run.launch.rank, first), first + 1):
            predictions = _predict_batch(run, model, task, batch, dtype)
            real = batch.is_real
            numbers.append(batch.rows[real])
            arrays.append({name: tensor.cpu()[real] for name, tensor in predictions.items()})
            if stoppable and stop_requested(run):
                model.train(was_training)
                raise StopRequested("stop requested during an evaluation")
            done += processes * len(numbers[-1])
            phase.update(min(done, len(rows)) - phase.done)
            if saved_parts is not None and saved_parts.is_due(num_batches):
                saved_parts.save(num_batches, _gather(run, numbers, arrays))
                numbers, arrays = [], []
    model.train(was_training)
    last, rate = _gather(run, numbers, arrays), (len(rows) - before) / (time.perf_counter() - started)
    return None if last is None else _in_order([*parts, last], len(rows)), rate


def _gather(run: Run, numbers: list[torch.Tensor], arrays: list[dict[str, torch.Tensor]]) -> Part | None:
    """Gathers the predictions of several batches from all processes; None except on rank 0. Empties
    `arrays`."""
    order = run.gather_rows(torch.cat(numbers))
    gathered = {
        name: run.gather_rows(torch.cat([batch.pop(name) for batch in arrays])) for name in list(arrays[0])
    }
    return (
        Part(order.numpy(), {name: tensor.numpy() for name, tensor in gathered.items()})
        if run.is_main
        else None
    )


def _in_order(parts: list[Part], num_rows: int) -> Predictions:
    """Joins the parts in the file's order. Raises `TrainingError` if a row is missing or duplicated."""
    order = np.concatenate([part.rows for part in parts])
    if not np.array_equal(np.sort(order), np.arange(num_rows)):
        raise TrainingError(
            f"evaluation saw {len(order)} rows instead of each of {num_rows} once; please report this"
        )
    places = np.argsort(order)
    return {
        name: np.concatenate([part.arrays.pop(name) for part in parts])[places]
        for name in list(parts[0].arrays)
    }


def _predict_batch(
    run: Run, model: Any, task: Task, batch: Batch, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Calls `Task.predict`. Raises `TrainingError` if memory does not suffice."""
    try:
        # generate() bypasses the prepared model's forward, which would switch autocast on.
        with run.accelerator.autocast(), row_lengths(batch.lengths):
            return task.predict(model, batch.to(run.device, dtype))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        largest = max(
            (tuple(tensor.shape) for tensor in batch.inputs.values()),
            key=lambda shape: torch.Size(shape).numel(),
        )
        raise TrainingError(
            f"out of memory while predicting a batch of {largest[0]} rows x "
            f"{'x'.join(map(str, largest[1:]))}. Try a smaller "
            f"--per_device_eval_batch_size or --max_tokens_per_eval_batch ({in_short(error)})"
        ) from error
