"""The training loop: steps, logging, evaluation and checkpoints."""

from __future__ import annotations

import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from samerun import checkpoint, signals
from samerun.batching.batches import train_loader
from samerun.checkpoint import CheckpointTarget, TrainState
from samerun.errors import EXIT_STOPPED, StopRequested, TrainingError, in_short, is_out_of_memory
from samerun.kernels.common import widest_float
from samerun.output import status
from samerun.output.progress import Phase
from samerun.reports.profiling import profiled
from samerun.runtime import Run
from samerun.signals import stop_requested, stop_run
from samerun.task import Batch
from samerun.training.average import averaged
from samerun.training.clock import StepClock, memory_mb, peak_memory_mb
from samerun.training.optimizer import set_learning_rate
from samerun.training.selection import evaluate_and_keep_best, out_of_patience
from samerun.training.splitting import MOST_HALVINGS
from samerun.training.step import seed_step, train_step
from samerun.training.training import Training

SKIPPED_LIMIT = 20  # fp16 updates skipped in a row; a loss scale of 2**16 is down to 1 after 16
READ_SECONDS = 2.0  # the host waits for a GPU at least this often, and then learns of requests to stop


def fit(run: Run, training: Training, state: TrainState) -> dict[str, float | None]:
    """Trains from `state` to the end of the plan, or until early stopping. Updates `state` and
    `training.model`; returns the train_* metrics.

    Raises `TrainingError` for a non-finite loss or gradient, before the step is saved, and `StopRequested`
    after a checkpoint if any process was requested to stop.
    """
    clock = StepClock(run.device)
    if (state.step >= training.plan.total_steps and not state.unevaluated) or out_of_patience(
        training.options, state
    ):
        run.print(f"training       is complete ({state.step} steps); nothing to do")
        metrics = _train_metrics(run, training, state, clock)
        return {
            name: value for name, value in metrics.items() if value is not None and name != "peak_memory_mb"
        }
    signals.defer()
    if stop_requested(run):
        stop_run(run, f"before step {state.step + 1}; there was nothing new to save")
    if state.halvings:
        _set_halvings(training, state, state.halvings)
    training.model.train()
    stopped_early = state.unevaluated and _evaluate_and_save(run, training, state, eval_due=True)
    if not stopped_early:
        _run_steps(run, training, state, clock)
    if stop_requested(run):
        _save_and_stop(run, training, state, False)
    wait_for_checkpoint(run, training)
    synchronise_buffers(run, training.model)
    signals.exit_with(EXIT_STOPPED)  # everything is on disk
    return _train_metrics(run, training, state, clock)


def _run_steps(run: Run, training: Training, state: TrainState, clock: StepClock) -> None:
    """Trains, logs, evaluates and saves until the plan ends or patience runs out."""
    plan, tracker = training.plan, training.tracker
    loader = train_loader(
        training.steps, state.step, training.options.dataloader_num_workers, run.device.type == "cuda"
    )
    if run.is_main:
        loader = profiled(loader, run.accelerator, training.options.profile, training.output_dir, tracker.say)
    tracker.progress.start()
    pending: list[tuple] = []  # (loss, gradient norm) of steps that the host has not read from the device
    next_read = state.step
    pace, scale = 0.0, _loss_scale(run)
    clock.mark()
    for micro_batches in loader:
        multiplier = plan.lr_multiplier(state.updates)
        set_learning_rate(training.optimizer, multiplier)
        pending.append(_step(run, training, state, micro_batches))
        previous_scale, scale = scale, _loss_scale(run)
        _count_update(run, training, state, scale < previous_scale)
        clock.mark()
        log_due = plan.due(state.step, plan.logging_steps)
        eval_due = training.validation is not None and plan.due(state.step, plan.eval_steps)
        save_due = plan.due(state.step, plan.save_steps)
        requested = False
        if log_due or eval_due or save_due or _host_is_device(run) or state.step > next_read:
            norms, requested, mean_pace = _read_losses(run, training, state, pending, pace)
            seconds = clock.read()
            state.train_seconds += seconds
            pace = seconds / len(norms)
            next_read = state.step + (int(READ_SECONDS / mean_pace) if mean_pace else 0)
        tracker.advance(state.losses[-1] if state.losses else None, plan.batch.global_batch_size)
        if log_due:
            seconds = clock.recent(len(state.losses))
            speed = {"samples_per_second": plan.batch.global_batch_size / seconds} if seconds else {}
            _log_step(training, state, multiplier, norms[-1], {**speed, "memory_mb": memory_mb(run.device)})
        if requested:
            _save_and_stop(run, training, state, eval_due)
        if eval_due or save_due:
            with Phase("evaluating and saving", shown=False):  # keeps its time out of the training's rate
                stops_early = _evaluate_and_save(run, training, state, eval_due)
            if stops_early:
                return
            clock.pause()
            clock.mark()


def _step(
    run: Run, training: Training, state: TrainState, micro_batches: list[Batch]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Does one optimizer step; returns (loss, gradient norm) as `train_step` does. Raises `TrainingError` if
    memory does not suffice."""
    step, options = state.step, training.options
    training.steps.enter(step)
    reseed = partial(seed_step, options.seed, step, run.launch.rank)
    reseed()
    try:
        result = train_step(
            run,
            training.model,
            training.optimizer,
            training.task,
            micro_batches,
            options.max_grad_norm,
            splitting=training.splitting,
            reseed=reseed,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(_out_of_memory(training, step, micro_batches, error)) from error
    state.step += 1
    state.count_tokens(*training.steps.tokens(step))
    return result


def restore(run: Run, path: Path, training: Training, state: TrainState) -> None:
    """Restores optimizer state and averaged weights from a checkpoint. The model must have the checkpoint's
    weights already."""
    idle_step = partial(_idle_step, run, training)
    checkpoint.restore_optimizer(run, path, training.model, training.optimizer, state, idle_step)
    if training.average is not None:
        training.average.restore(checkpoint.load_average(path))


def _idle_step(run: Run, training: Training) -> None:
    """Does a step at learning rate 0, which creates the optimizer's state. Keeps the buffers: a step changes
    batch norm's statistics."""
    training.model.train()  # gradient checkpointing depends on it
    buffers = [(buffer, buffer.clone()) for buffer in training.model.buffers()]
    set_learning_rate(training.optimizer, 0.0)
    train_step(run, training.model, training.optimizer, training.task, training.steps[0], 0.0, weight=0.0)
    for buffer, before in buffers:
        buffer.copy_(before)


def _read_losses(
    run: Run, training: Training, state: TrainState, pending: list, pace: float
) -> tuple[list[float], bool, float]:
    """Reads the losses of the pending steps into `state` with one synchronisation. All processes must call it
    at the same step.

    Returns (gradient norms of these steps; whether any process was requested to stop; the processes' mean
    `pace`, seconds per step). Requests, paces and halvings of micro-batches travel with the losses in one
    all-reduce.
    """
    dtype = widest_float(run.device)
    halvings = [float(number == training.splitting.halvings) for number in range(MOST_HALVINGS + 1)]
    mine = torch.tensor(
        [float(signals.requested() is not None), pace, *halvings], dtype=dtype, device=run.device
    )
    sums = run.sum(torch.cat([torch.stack([loss.to(dtype) for loss, _ in pending]), mine])).tolist()
    losses, (requested, paces, *processes) = sums[: len(pending)], sums[len(pending) :]
    most = max(number for number, count in enumerate(processes) if count)  # halvings of any process
    if most > state.halvings:
        training.tracker.say(
            f"note           out of memory by step {state.step}: micro-batches are split into "
            f"{2**most} parts; the global "
            "batch does not change"
        )
        _set_halvings(training, state, most)
    norms = [float(norm) if norm is not None else math.nan for _, norm in pending]
    first = state.step - len(pending)
    pending.clear()
    for offset, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        # fp16 gradients may overflow: the loss scaler skips such steps. A non-finite loss is no overflow.
        if not math.isfinite(loss) or (not math.isfinite(norm) and run.launch.precision != "fp16"):
            raise TrainingError(_not_finite(training, first + offset, loss, norm))
    state.losses += losses
    for loss in losses:  # not sum(losses): rounding would depend on how many steps were read together
        state.loss_total += loss
    return norms, requested > 0, paces / run.launch.world_size


def _set_halvings(training: Training, state: TrainState, halvings: int) -> None:
    """Splits micro-batches into 2 ** `halvings` parts from now on. Processes agree on the largest number of
    any process."""
    state.halvings = training.splitting.halvings = halvings
    status.cut_micro_batches(2**halvings)


def _host_is_device(run: Run) -> bool:
    """Whether reading a result does not wait for a device."""
    return run.device.type == "cpu"


def _evaluate_and_save(run: Run, training: Training, state: TrainState, eval_due: bool) -> bool:
    """Evaluates and saves, if due. Returns whether training stops early."""
    state.unevaluated = False
    synchronise_buffers(run, training.model)
    stops_early = False
    try:
        if eval_due:
            with averaged(training.average):
                stops_early = evaluate_and_keep_best(run, training, state)
    except StopRequested:
        _save_and_stop(run, training, state, True)
    save_steps = training.plan.save_steps
    if training.plan.due(state.step, save_steps) or (stops_early and save_steps is not None):
        save(run, training, state)
    return stops_early


def save(run: Run, training: Training, state: TrainState) -> None:
    """Starts writing a checkpoint (see `checkpoint.save`). All processes must call it."""
    started = time.perf_counter()
    synchronise_buffers(run, training.model)
    state.stream = training.steps.start_at(state.step)
    target = CheckpointTarget(
        training.output_dir / checkpoint.FOLDER,
        training.fingerprint,
        training.options.save_total_limit,
        training.writer,
        training.tracker.flush,  # the history must be on disk before a checkpoint of the same step
    )
    average = None if training.average is None else training.average.state()
    with Phase("saving", shown=run.is_main):
        checkpoint.save(run, target, training.model, training.optimizer, state, average)
    training.save_stalls.append(time.perf_counter() - started)


def wait_for_checkpoint(run: Run, training: Training) -> None:
    """Waits until a checkpoint that is being written is on disk. All processes must call it."""
    with Phase("saving", shown=run.is_main):
        checkpoint.wait(run, training.writer)


def _save_and_stop(run: Run, training: Training, state: TrainState, unevaluated: bool) -> NoReturn:
    state.unevaluated = unevaluated
    save(run, training, state)
    wait_for_checkpoint(run, training)
    path = training.output_dir / checkpoint.FOLDER / f"step_{state.step}"
    saved = f"step {state.step} of {training.plan.total_steps} is saved in {path}"
    stop_run(run, f"{saved}; the same command with --resume_from_checkpoint auto goes on")


def synchronise_buffers(run: Run, model: torch.nn.Module) -> None:
    """Broadcasts rank 0's buffers, because batch norm's statistics differ between processes. All processes
    must call it."""
    if run.launch.world_size == 1:
        return
    plain = run.unwrapped(model)
    saved = plain.state_dict(keep_vars=True)
    for name, buffer in plain.named_buffers():
        if name in saved:
            torch.distributed.broadcast(buffer.data, 0)


def _not_finite(training: Training, step: int, loss: float, norm: float) -> str:
    rows = sorted(int(row) for row in training.steps.rows(step))
    listed = ", ".join(map(str, rows[:32])) + (", ..." if len(rows) > 32 else "")
    problem = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
    buffer = (
        "" if training.steps.split.stream is None else f" in buffer {training.plan.epoch_of(step)[0] + 1}"
    )
    return (
        f"step {step + 1}: {problem}; training rows of that batch{buffer} (0-based): {listed}. The "
        "step was not saved. Try a "
        "smaller --learning_rate, a longer --warmup_steps, --max_grad_norm 1, or bf16 instead of fp16"
    )


def _out_of_memory(training: Training, step: int, micro_batches: list[Batch], error: Exception) -> str:
    shapes = {tuple(tensor.shape) for batch in micro_batches for tensor in batch.inputs.values()}
    largest = max(shapes, key=lambda shape: (torch.Size(shape).numel(), shape))
    by_rows = 2**training.splitting.halvings >= largest[0]
    smaller = (
        "a smaller --per_device_train_batch_size beside --global_batch_size "
        f"{training.plan.batch.global_batch_size}, "
    )
    return (
        f"step {step + 1}: out of memory on a batch of {largest[0]} rows x {'x'.join(map(str, largest[1:]))}"
        f"{', even row by row' if by_rows else ''}. Try "
        f"{'' if by_rows else smaller}{training.task.memory_advice}"
        "--gradient_checkpointing, --mixed_precision bf16, or a ds_configs/zero*.json file "
        f"({in_short(error)})"
    )


def _loss_scale(run: Run) -> float:
    """torch's fp16 loss scale, 1.0 without a scaler. Synchronises with the GPU."""
    return run.accelerator.scaler.get_scale() if run.accelerator.scaler is not None else 1.0


def _count_update(run: Run, training: Training, state: TrainState, scale_fell: bool) -> None:
    """Counts the step as an update, or as skipped after an fp16 overflow."""
    # A fused optimizer skips overflowed gradients itself, on the GPU. Accelerate checks only whether its step
    # was called.
    skipped = scale_fell if run.deepspeed_config is None else run.accelerator.optimizer_step_was_skipped
    if run.launch.precision != "fp16" or not skipped:
        state.updates += 1
        state.skipped_in_a_row = 0
        if training.average is not None:
            training.average.update(state.updates)
        return
    state.skipped_in_a_row += 1
    if state.skipped_in_a_row >= SKIPPED_LIMIT:
        raise TrainingError(
            f"step {state.step}: {SKIPPED_LIMIT} fp16 updates in a row overflowed and were skipped; "
            "use bf16, or a smaller "
            "--learning_rate"
        )


def _log_step(
    training: Training, state: TrainState, multiplier: float, norm: float, speed: dict[str, float]
) -> None:
    event = {
        "step": state.step,
        "epoch": round(state.step / training.plan.steps_per_epoch, 6),
        "loss": sum(state.losses) / len(state.losses),
        "learning_rate": training.plan.learning_rate * multiplier,
        "grad_norm": norm if math.isfinite(norm) else None,
    }
    state.losses.clear()
    training.tracker.log(event, speed=speed)


def _train_metrics(
    run: Run, training: Training, state: TrainState, clock: StepClock
) -> dict[str, float | None]:
    rows, seconds, stalls = training.plan.rows_before(state.step), state.train_seconds, training.save_stalls
    of_tokens = {}
    if training.steps.has_tokens:
        of_tokens = {
            "train_tokens_per_second": state.tokens / seconds
            if seconds and state.tokens is not None
            else None,
            "train_padding_share": 1 - state.tokens / state.padded_tokens if state.padded_tokens else None,
        }
    return {
        "train_loss": state.loss_total / state.step if state.step else None,
        "train_runtime": seconds,
        "train_samples_per_second": rows / seconds if seconds else None,
        **of_tokens,
        "train_step_time_p50": clock.percentile(0.5),
        "train_step_time_p95": clock.percentile(0.95),
        "train_save_stall": statistics.median(stalls) if stalls else None,
        "train_steps": state.step,
        "train_skipped_steps": state.step - state.updates,
        "peak_memory_mb": peak_memory_mb(run.device),
    }
