"""Every row of a file once, whatever the number of processes. Level 7."""

from __future__ import annotations

import time
from typing import Any

import torch

from finetune.errors import StopRequested, TrainingError
from finetune.kernels.row_lengths import known
from finetune.launching.processes import Run
from finetune.launching.shutdown import stop_requested
from finetune.task import Record, Task
from finetune.training.batches import EvalRows


@torch.no_grad()
def evaluate(
    run: Run, model: Any, task: Task, rows: EvalRows, stoppable: bool = False
) -> tuple[dict[str, float | None], list[Record] | None]:
    """The figures of a file, each row counted once whatever the number of processes: (figures, on every process; records in
    the file's order, on rank 0). Raises `TrainingError` if a row is missing or came twice."""
    records, _ = predict(run, model, task, rows, stoppable)

    def score() -> dict[str, float | None]:
        return task.score(records)

    return run.on_main(score), records


@torch.no_grad()
def predict(run: Run, model: Any, task: Task, rows: EvalRows, stoppable: bool = False) -> tuple[list[Record] | None, float]:
    """(one record per row in the file's order, on rank 0 and None elsewhere; seconds it took).

    Raises `StopRequested` after a batch if it is `stoppable` and any process was asked to stop.
    """
    started = time.perf_counter()
    was_training = model.training
    model.eval()
    mine: list[Record] = []
    for batch in rows.batches(run.launch.world_size, run.launch.rank):
        # What does not go through the prepared model's forward, as generate(), would not be autocast.
        with run.accelerator.autocast(), known(batch.lengths):
            mine += task.predict(model, batch.to(run.device))
        if stoppable and stop_requested(run):
            model.train(was_training)
            raise StopRequested("asked to stop during an evaluation")
    model.train(was_training)
    gathered = run.gather(mine)
    records = None
    if run.is_main:
        records = sorted(gathered, key=lambda record: record["row"])
        if [record["row"] for record in records] != list(range(len(rows))):
            raise TrainingError(f"evaluation saw {len(records)} rows instead of each of {len(rows)} once; please report this")
    return records, time.perf_counter() - started
