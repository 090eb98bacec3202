"""The loop: steps, and what is due after one. Level 8."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from finetune.checkpoints import checkpoint, saving
from finetune.checkpoints.checkpoint import TrainState
from finetune.checkpoints.saving import Shelf
from finetune.errors import EXIT_STOPPED, StopRequested, TrainingError
from finetune.launching import signals
from finetune.launching.processes import Run
from finetune.launching.shutdown import stop_requested, stop_run
from finetune.output.writer_thread import Background
from finetune.plan import Plan, lr_multiplier
from finetune.reports.profiling import profiled
from finetune.reports.tracker import Tracker
from finetune.task import Batch, Record, Task
from finetune.training.batches import EvalRows, TrainSteps, train_loader
from finetune.training.clock import StepClock, peak_memory_mb
from finetune.training.evaluation import evaluate
from finetune.training.optimizer import set_learning_rate
from finetune.training.step import seed_step, train_step

SKIPPED_LIMIT = 20  # fp16 updates skipped in a row; a scale that starts at 2**16 is down to 1 after 16
LOOK_SECONDS = 2.0  # the host waits for a GPU at least this often, and learns of requests to stop then


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
    writer: Background = field(default_factory=Background)  # of checkpoints


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
    profile: int | None = None  # steps that torch's profiler watches
    in_shards: bool = False  # checkpoints


def fit(run: Run, plan: Plan, training: Training, options: FitOptions, state: TrainState) -> dict[str, float | None]:
    """Trains from `state` to the end of the plan, or until early stopping. Returns the train_* figures; `state` and
    `training.model` hold the rest.

    Raises `TrainingError` for a loss or gradient that is not finite, before anything of it is saved, and `StopRequested`
    after a checkpoint if any process was asked to stop.
    """
    if (state.step >= plan.total_steps and not state.unevaluated) or _out_of_patience(options, state):
        run.print(f"training       is complete ({state.step} steps); nothing to do")
        known = _train_figures(run, training, state, StepClock(run.device), [])
        return {name: value for name, value in known.items() if value is not None and name != "peak_memory_mb"}
    signals.defer()
    if stop_requested(run):
        stop_run(run, f"before step {state.step + 1}; there was nothing new to save")
    clock, pending, stalls = StepClock(run.device), [], []
    training.model.train()
    done = state.unevaluated and _finish_step(run, plan, training, options, state, stalls, True)
    loader = train_loader(training.steps, state.step, options.dataloader_num_workers, run.device.type == "cuda")
    if run.is_main:
        loader = profiled(loader, options.profile, training.output_dir, run.device, training.tracker.say)
    started = time.perf_counter()
    first_step = look = state.step
    pace, scale = 0.0, _loss_scale(run)
    clock.mark()
    for micro_batches in () if done else loader:
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
        before, scale = scale, _loss_scale(run)
        _count_skipped(run, state, scale < before)
        pending.append((loss, norm))
        clock.mark()
        log_due = plan.due(state.step, plan.logging_steps)
        eval_due = training.validation is not None and plan.due(state.step, plan.eval_steps)
        save_due = plan.due(state.step, plan.save_steps)
        tokens, padded = training.steps.tokens(step)
        state.tokens += tokens
        state.padded_tokens += padded
        asked = False
        if log_due or eval_due or save_due or _host_is_device(run) or state.step > look:
            norms, asked, agreed_pace = _read(run, training, state, pending, pace)
            seconds = clock.read()
            state.train_seconds += seconds
            pace = seconds / len(norms)
            look = state.step + (int(LOOK_SECONDS / agreed_pace) if agreed_pace else 0)
        rate = plan.batch.global_batch_size * (state.step - first_step) / (time.perf_counter() - started)
        training.tracker.advance(state.losses[-1] if state.losses else None, plan.learning_rate * multiplier, rate)
        if log_due:
            _log_step(plan, training, state, multiplier, norms[-1], rate)
        if asked:
            _save_and_stop(run, plan, training, options, state, stalls, eval_due)
        if (eval_due or save_due) and _finish_step(run, plan, training, options, state, stalls, eval_due):
            break
        if eval_due or save_due:
            clock.pause()
            clock.mark()
    if stop_requested(run):
        _save_and_stop(run, plan, training, options, state, stalls, False)
    saving.wait(run, training.writer)
    signals.exit_with(EXIT_STOPPED)  # everything is on disk
    return _train_figures(run, training, state, clock, stalls)


def restore(run: Run, path: Path, training: Training, state: TrainState) -> None:
    """Puts the optimizer's moments back from a checkpoint whose weights the model already has."""

    def idle_step() -> None:
        set_learning_rate(training.optimizer, 0.0)
        micro_batches = training.steps[0]
        train_step(run, training.model, training.optimizer, training.task, micro_batches, 0.0, weight=0.0)

    checkpoint.restore_optimizer(run, path, training.model, training.optimizer, state, idle_step)


def _read(run: Run, training: Training, state: TrainState, pending: list, pace: float) -> tuple[list[float], bool, float]:
    """Waits for the device once, for all steps since the last time; all processes must call it at the same step.

    Returns (gradient norms of those steps; whether any process was asked to stop; mean of the processes' `pace`, seconds per
    step). The last two travel with the losses: they cost no exchange and no wait of their own.
    """
    mine = torch.tensor([float(signals.requested() is not None), pace], dtype=torch.float64, device=run.device)
    *losses, asked, paces = run.sum(torch.cat([torch.stack([loss.double() for loss, _ in pending]), mine])).tolist()
    norms = [float(norm) if norm is not None else math.nan for _, norm in pending]
    first = state.step - len(pending)
    pending.clear()
    for offset, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        # An fp16 gradient that overflows is skipped and scaled down; a loss that is not finite is no overflow.
        if not math.isfinite(loss) or (not math.isfinite(norm) and run.launch.precision != "fp16"):
            raise TrainingError(_not_finite(training, first + offset, loss, norm))
    state.losses += losses
    for loss in losses:  # one by one, since how many come together depends on the clock
        state.loss_total += loss
    return norms, asked > 0, paces / run.launch.world_size


def _host_is_device(run: Run) -> bool:
    return run.device.type == "cpu"


def _finish_step(
    run: Run, plan: Plan, training: Training, options: FitOptions, state: TrainState, stalls: list[float], eval_due: bool
) -> bool:
    """Evaluates if that is due, saves if that is due; returns whether training stops early."""
    state.unevaluated = False
    try:
        done = eval_due and _evaluate_and_keep_best(run, plan, training, options, state)
    except StopRequested:
        _save_and_stop(run, plan, training, options, state, stalls, True)
    if plan.due(state.step, plan.save_steps) or (done and plan.save_steps is not None):
        _save(run, training, options, state, stalls)
    return done


def save(run: Run, training: Training, state: TrainState, limit: int, in_shards: bool) -> None:
    """Begins a checkpoint of where `training` stands (see `saving.save`). All processes must call it."""
    # A checkpoint that survives a power cut must not be ahead of the history.
    first, folder = training.tracker.flush, training.output_dir / checkpoint.FOLDER
    shelf = Shelf(folder, training.identity, limit, training.writer, first, in_shards)
    saving.save(run, shelf, training.model, training.optimizer, state)


def _save(run: Run, training: Training, options: FitOptions, state: TrainState, stalls: list[float]) -> None:
    """Begins a checkpoint; adds to `stalls` how many seconds the run was held for it."""
    started = time.perf_counter()
    save(run, training, state, options.save_total_limit, options.in_shards)
    stalls.append(time.perf_counter() - started)


def _save_and_stop(
    run: Run, plan: Plan, training: Training, options: FitOptions, state: TrainState, stalls: list[float], unevaluated: bool
) -> NoReturn:
    state.unevaluated = unevaluated
    _save(run, training, options, state, stalls)
    saving.wait(run, training.writer)
    path = training.output_dir / checkpoint.FOLDER / f"step_{state.step}"
    done = f"step {state.step} of {plan.total_steps} is saved in {path}"
    stop_run(run, f"{done}; the same command with --resume_from_checkpoint auto goes on")


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
        "--per_device_train_batch_size or --max_tokens_per_micro_batch (the global batch stays as it is), "
        "--gradient_checkpointing, a smaller --max_length, "
        f"--mixed_precision bf16, or a ds_configs/zero*.json file ({str(error).splitlines()[0]})"
    )


def _loss_scale(run: Run) -> float:
    """torch's scale of fp16 losses; 1.0 where there is none. Waits for the GPU."""
    return run.accelerator.scaler.get_scale() if run.accelerator.scaler is not None else 1.0


def _count_skipped(run: Run, state: TrainState, scale_fell: bool) -> None:
    # A fused optimizer is called for a gradient that overflowed as well and skips it by itself, on the GPU: Accelerate, which
    # looks whether it was called, does not notice.
    skipped = scale_fell if run.deepspeed_config is None else run.accelerator.optimizer_step_was_skipped
    if run.launch.precision != "fp16" or not skipped:
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
    figures, records = evaluate(run, training.model, training.task, training.validation, stoppable=True)
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


def _train_figures(
    run: Run, training: Training, state: TrainState, clock: StepClock, stalls: list[float]
) -> dict[str, float | None]:
    rows = sum(len(training.steps.rows(step)) for step in range(state.step))
    seconds = state.train_seconds
    return {
        "train_loss": state.loss_total / state.step if state.step else None,
        "train_runtime": seconds,
        "train_samples_per_second": rows / seconds if seconds else None,
        "train_tokens_per_second": state.tokens / seconds if seconds else None,
        "train_padding_share": 1 - state.tokens / state.padded_tokens if state.padded_tokens else None,
        "train_step_time_p50": clock.percentile(0.5),
        "train_step_time_p95": clock.percentile(0.95),
        "train_save_stall": statistics.median(stalls) if stalls else None,
        "train_steps": state.step,
        "train_skipped_steps": state.step - state.updates,
        "peak_memory_mb": peak_memory_mb(run.device),
    }
