"""The step, the loop and the evaluation. Level 6.

One formula for every launch: the loss summed over a micro-batch is multiplied by (accumulation x processes / targets in the
whole global batch). Accelerate or DeepSpeed divides by the accumulation, DDP or ZeRO by the processes, and what is left is
the gradient of the mean over the global batch, the incomplete last batch of an epoch included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune import checkpoint, zero
from finetune.checkpoint import TrainState
from finetune.clock import StepClock, peak_memory_mb
from finetune.data import EvalRows, TrainSteps, train_loader
from finetune.failure import TrainingError
from finetune.launch import Run
from finetune.optim import set_learning_rate
from finetune.plan import Plan, lr_multiplier
from finetune.task import Batch, Record, Task
from finetune.tracker import Tracker

SKIPPED_LIMIT = 20  # fp16 updates skipped in a row; a scale that starts at 2**16 is down to 1 after 16


@dataclass
class Training:
    """What `fit` works on. `on_best` exports a better model; it is called on every process, with rank 0's records."""

    model: Any
    optimizer: Any
    task: Task
    steps: TrainSteps
    validation: EvalRows | None
    tracker: Tracker
    output_dir: Path
    identity: dict[str, Any]
    on_best: Callable[[list[Record] | None, dict[str, float | None]], None]


@dataclass(frozen=True)
class FitOptions:
    """The arguments that `fit` itself looks at."""

    seed: int
    max_grad_norm: float
    headline: str
    greater_is_better: bool
    early_stopping_patience: int | None
    save_total_limit: int
    dataloader_num_workers: int
    shown: tuple[str, ...]  # evaluation figures for the console


def train_step(
    run: Run,
    model: Any,
    optimizer: Any,
    task: Task,
    micro_batches: list[Batch],
    max_grad_norm: float,
    weight: float = 1.0,
) -> tuple[torch.Tensor, Any]:
    """One optimizer step over this process's micro-batches of one global batch.

    Returns (this process's share of the mean loss: the sum over processes is the mean over the global batch's targets; the
    norm of the full gradient before clipping). `weight` 0 makes a step whose gradient is zero.
    """
    accelerator = run.accelerator
    batches = [batch.to(run.device) for batch in micro_batches]
    targets = run.sum(torch.stack([task.num_targets(batch) for batch in batches]).sum()).clamp(min=1)
    scale = weight * accelerator.gradient_accumulation_steps * run.launch.world_size / targets
    loss = torch.zeros((), device=run.device)
    for position, batch in enumerate(batches):
        last = position == len(batches) - 1
        # Set by hand: `accumulate()` asks the dataloader where it ends, and steps at the wrong place when we fetch ahead.
        accelerator.sync_gradients = last
        with nullcontext() if last else accelerator.no_sync(model):
            loss_sum = task.loss_sum(model, batch)
            accelerator.backward(loss_sum * scale)
        loss += loss_sum.detach().float()
    norm = (
        zero.grad_norm(model)
        if run.deepspeed_config is not None
        else accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    )
    optimizer.step()
    optimizer.zero_grad()
    return loss / targets, norm


@torch.no_grad()
def evaluate(run: Run, model: Any, task: Task, rows: EvalRows) -> tuple[dict[str, float | None], list[Record] | None]:
    """The figures of a file, each row counted once whatever the number of processes: (figures, on every process; records in
    the file's order, on rank 0). Raises `TrainingError` if a row is missing or came twice."""
    records, _ = predict(run, model, task, rows)

    def score() -> dict[str, float | None]:
        return task.score(records)

    return run.on_main(score), records


@torch.no_grad()
def predict(run: Run, model: Any, task: Task, rows: EvalRows) -> tuple[list[Record] | None, float]:
    """(one record per row in the file's order, on rank 0 and None elsewhere; seconds it took)."""
    started = time.perf_counter()
    was_training = model.training
    model.eval()
    mine: list[Record] = []
    for batch in rows.batches(run.launch.world_size, run.launch.rank):
        mine += task.predict(model, batch.to(run.device))
    model.train(was_training)
    gathered = run.gather(mine)
    records = None
    if run.is_main:
        records = sorted(gathered, key=lambda record: record["row"])
        if [record["row"] for record in records] != list(range(len(rows))):
            raise TrainingError(f"evaluation saw {len(records)} rows instead of each of {len(rows)} once; please report this")
    return records, time.perf_counter() - started


def fit(run: Run, plan: Plan, training: Training, options: FitOptions, state: TrainState) -> dict[str, float | None]:
    """Trains from `state` to the end of the plan, or until early stopping. Returns the train_* figures; `state` and
    `training.model` hold the rest.

    Raises `TrainingError` for a loss or gradient that is not finite, before anything of it is saved.
    """
    if state.step >= plan.total_steps or _out_of_patience(options, state):
        run.print(f"training       is complete ({state.step} steps); nothing to do")
        return {}
    clock, pending = StepClock(run.device), []
    training.model.train()
    loader = train_loader(training.steps, state.step, options.dataloader_num_workers, run.device.type == "cuda")
    started = time.perf_counter()
    first_step = state.step
    clock.mark()
    for micro_batches in loader:
        step = state.step
        multiplier = lr_multiplier(state.updates, plan.total_steps, plan.warmup_steps, plan.lr_scheduler_type)
        set_learning_rate(training.optimizer, multiplier)
        seed_step(options.seed, step, run.launch.rank)
        try:
            loss, norm = train_step(
                run, training.model, training.optimizer, training.task, micro_batches, options.max_grad_norm
            )
        except torch.OutOfMemoryError as error:
            raise TrainingError(_out_of_memory(step, micro_batches, error)) from error
        state.step += 1
        _count_skipped(run, training, state)
        pending.append((loss, norm))
        clock.mark()
        log_due = plan.due(state.step, plan.logging_steps)
        eval_due = training.validation is not None and plan.due(state.step, plan.eval_steps)
        save_due = plan.due(state.step, plan.save_steps)
        state.tokens += int(training.steps.lengths[training.steps.rows(step)].sum())
        if log_due or eval_due or save_due or run.device.type == "cpu":
            norms = _read(run, plan, training, state, pending)
            state.train_seconds += clock.read()
        rate = plan.batch.global_batch_size * (state.step - first_step) / (time.perf_counter() - started)
        training.tracker.advance(state.losses[-1] if state.losses else None, plan.learning_rate * multiplier, rate)
        if log_due:
            _log_step(plan, training, state, multiplier, norms[-1], rate)
        stop = eval_due and _evaluate_and_keep_best(run, plan, training, options, state)
        if save_due or (stop and plan.save_steps is not None):
            folder = training.output_dir / "checkpoints"
            checkpoint.save(run, folder, training.model, training.optimizer, state, training.identity, options.save_total_limit)
        if eval_due or save_due:
            clock.pause()
            clock.mark()
        if stop:
            break
    return _train_figures(run, plan, training, state, clock)


def restore(run: Run, path: Path, training: Training, state: TrainState) -> None:
    """Puts the optimizer's moments back from a checkpoint whose weights the model already has."""

    def idle_step() -> None:
        set_learning_rate(training.optimizer, 0.0)
        micro_batches = training.steps[0]
        train_step(run, training.model, training.optimizer, training.task, micro_batches, 0.0, weight=0.0)

    checkpoint.restore_optimizer(run, path, training.model, training.optimizer, state, idle_step)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Makes dropout a function of (seed, step, rank): no random state to save, and none to lose."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1))


def _read(run: Run, plan: Plan, training: Training, state: TrainState, pending: list) -> list[float]:
    """Waits for the device once, for all steps since the last time; returns their gradient norms."""
    losses = run.sum(torch.stack([loss.double() for loss, _ in pending])).tolist()
    norms = [float(norm) if norm is not None else math.nan for _, norm in pending]
    first = state.step - len(pending)
    pending.clear()
    for offset, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        # An fp16 gradient that overflows is skipped and scaled down; a loss that is not finite is no overflow.
        if not math.isfinite(loss) or (not math.isfinite(norm) and run.launch.precision != "fp16"):
            raise TrainingError(_not_finite(training, first + offset, loss, norm))
    state.losses += losses
    state.loss_total += sum(losses)
    return norms


def _not_finite(training: Training, step: int, loss: float, norm: float) -> str:
    rows = sorted(int(row) for row in training.steps.rows(step))
    shown = ", ".join(map(str, rows[:32])) + (", ..." if len(rows) > 32 else "")
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
    return (
        f"step {step + 1}: {what}; training rows of that batch (0-based): {shown}. Nothing of it was saved. Try a smaller "
        "--learning_rate, a longer --warmup_steps, --max_grad_norm 1, or bf16 instead of fp16"
    )


def _out_of_memory(step: int, micro_batches: list[Batch], error: Exception) -> str:
    shapes = {tuple(tensor.shape) for batch in micro_batches for tensor in batch.inputs.values()}
    largest = max(shapes, key=lambda shape: (torch.Size(shape).numel(), shape))
    return (
        f"step {step + 1}: out of memory on a batch of {largest[0]} rows x {'x'.join(map(str, largest[1:]))}. Try a smaller "
        "--per_device_train_batch_size (the global batch stays as it is), --gradient_checkpointing, a smaller --max_length, "
        f"--mixed_precision bf16, or a ds_configs/zero*.json file ({str(error).splitlines()[0]})"
    )


def _count_skipped(run: Run, training: Training, state: TrainState) -> None:
    if run.launch.precision != "fp16" or not run.accelerator.optimizer_step_was_skipped:
        state.updates += 1
        state.skipped_in_a_row = 0
        return
    state.skipped_in_a_row += 1
    if state.skipped_in_a_row >= SKIPPED_LIMIT:
        raise TrainingError(
            f"step {state.step}: {SKIPPED_LIMIT} fp16 updates in a row overflowed and were skipped; use bf16, or a smaller "
            "--learning_rate"
        )


def _log_step(plan: Plan, training: Training, state: TrainState, multiplier: float, norm: float, rate: float) -> None:
    event = {
        "step": state.step,
        "epoch": round(state.step / plan.steps_per_epoch, 6),
        "loss": sum(state.losses) / len(state.losses),
        "learning_rate": plan.learning_rate * multiplier,
        "grad_norm": norm if math.isfinite(norm) else None,
    }
    state.losses.clear()
    training.tracker.log(event, speed={"samples_per_second": rate})


def _evaluate_and_keep_best(run: Run, plan: Plan, training: Training, options: FitOptions, state: TrainState) -> bool:
    """Evaluates, exports the model if it is the best so far; returns whether patience has run out."""
    figures, records = evaluate(run, training.model, training.task, training.validation)
    training.tracker.log(
        {
            "step": state.step,
            "epoch": round(state.step / plan.steps_per_epoch, 6),
            **{f"eval_{name}": value for name, value in figures.items()},
        },
        shown=tuple(f"eval_{name}" for name in options.shown),
    )
    metric = figures.get(options.headline)
    if metric is not None and _is_better(metric, state.best_metric, options.greater_is_better):
        state.best_metric, state.best_step, state.evaluations_without_best = metric, state.step, 0
        training.on_best(records, figures)
    else:
        state.evaluations_without_best += 1
    if not _out_of_patience(options, state):
        return False
    evaluations = state.evaluations_without_best
    training.tracker.say(f"stopping early: no better {options.headline} in {evaluations} evaluations")
    return True


def _out_of_patience(options: FitOptions, state: TrainState) -> bool:
    patience = options.early_stopping_patience
    return patience is not None and state.evaluations_without_best >= patience


def _is_better(metric: float, best: float | None, greater_is_better: bool) -> bool:
    return best is None or (metric > best if greater_is_better else metric < best)


def _train_figures(run: Run, plan: Plan, training: Training, state: TrainState, clock: StepClock) -> dict[str, float | None]:
    rows = sum(len(training.steps.rows(step)) for step in range(state.step))
    seconds = state.train_seconds
    return {
        "train_loss": state.loss_total / state.step if state.step else None,
        "train_runtime": seconds,
        "train_samples_per_second": rows / seconds if seconds else None,
        "train_tokens_per_second": state.tokens / seconds if seconds else None,
        "train_step_time_p50": clock.percentile(0.5),
        "train_step_time_p95": clock.percentile(0.95),
        "train_steps": state.step,
        "train_skipped_steps": state.step - state.updates,
        "peak_memory_mb": peak_memory_mb(run.device),
    }
