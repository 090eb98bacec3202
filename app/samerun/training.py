"""A training, top to bottom: prepare or resume, the loop, one step, what is due after it, the end.

The loss summed over a micro-batch is multiplied by (accumulation x processes / targets of the global batch).
Accelerate or DeepSpeed divides by the accumulation, DDP, ZeRO or FSDP by the processes. The result is the
gradient of the mean over the global batch, also for the incomplete last batch of an epoch.
"""

import contextlib
import copy
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from samerun import checkpoint, fsdp, machines, mirror, signals, task_scripts
from samerun.checkpoint import TrainState
from samerun.console import Phase
from samerun.contract import losses_add_up
from samerun.data.batches import TrainBatches, train_loader
from samerun.embeddings import train_occurring
from samerun.errors import (
    EXIT_STOPPED,
    InputError,
    StopRequested,
    TrainingError,
    in_short,
    is_out_of_memory,
    process_name,
)
from samerun.evaluate import eval_rows, evaluate, input_dtype
from samerun.files import Background, write_json
from samerun.graphs import Passes
from samerun.kernels.dropout import dropout_by_row, use_row_modules
from samerun.kernels.masks import use_known_masks
from samerun.launch import Launch
from samerun.layers import checkpoint_activations, compile_layers, has_statistics, switch_off_randomness
from samerun.memory import DryRun, Layout, dry_run, freeze_unused, memory_lines
from samerun.optimizer import WeightAverage, averaged, build_optimizer, set_learning_rate, state_bytes
from samerun.parsing import as_dict
from samerun.plan import Plan
from samerun.profiling import StepClock, memory_mb, peak_memory_mb, profiled
from samerun.reports.page import save_best_predictions
from samerun.reports.tracker import Tracker, project_of, read_history, show_image
from samerun.run_folder import BEST, RUN_FILE, begin_best, merge_metrics, status
from samerun.runtime import Run
from samerun.signals import stop_requested, stop_run
from samerun.start import OpenedRun, replace_run
from samerun.task import Batch, Data, Predictions, Task, higher_is_better

SYNCHRONOUS = ("cpu",)  # devices on which reading a result does not wait
SKIPPED_LIMIT = 20  # fp16 updates skipped in a row; a loss scale of 2**16 is down to 1 after 16
FORECAST_STEPS = 5  # that foretell the time of all; the one before them is slower
UNUSED = re.compile(r"parameter indices which did not receive grad for rank \d+: ([\d ]+)", re.IGNORECASE)
READ_SECONDS = 2.0  # the host waits for a GPU at least this often, and then learns of requests to stop


class Training:
    """Model, data and progress of a training. All processes must call all of its methods."""

    # Prepare or resume

    def __init__(
        self,
        run: Run,
        arguments: Any,
        task: Task,
        data: Data,
        plan: Plan,
        model: torch.nn.Module,
        *,
        opened: OpenedRun,
    ) -> None:
        """Prepares `model` and its optimizer with Accelerate and restores the checkpoint to resume from, if
        there is one."""
        self.run, self.arguments, self.task, self.plan = run, arguments, task, plan
        self.folder, self.fingerprint = Path(arguments.output_dir), opened.fingerprint
        self.description = opened.description
        self.state, self.writer = TrainState(), Background()
        self.save_stalls: list[float] = []  # seconds for which each checkpoint blocked the training
        self.evaluation_stalls: list[float] = []  # likewise each evaluation, with the export of a best model
        self.forecast: float | None = None  # train_runtime, from the first steps
        self.passes: Passes | None = None
        self.unused_decay_rate = 0.0  # of the embeddings of tokens that do not occur, at the peak
        self.greater_is_better = higher_is_better(task, task.best_metric)
        place, dropout_by = None, "row" if run.launch.dropout_by_row else "torch"
        self._train_occurring(model)
        if opened.resume is not None:
            # On other machines --output_dir, and so the checkpoint's path, may be another.
            place = checkpoint.fetch(run, opened.resume, self.folder / checkpoint.FOLDER)
            self.state = checkpoint.load_state(place, opened.fingerprint)
            recover = partial(checkpoint.recover_best, self.folder, self.state, task, self._is_complete())
            self.state, notes = run.from_rank0(recover)
            before = self.state.dropout_by or "torch"
            if before != dropout_by:
                notes.append(
                    f"the checkpoint's steps had dropout by {before}, from here on it is by {dropout_by} "
                    "(--dropout_by): the masks are not those of a run without this change"
                )
            run.print(*(f"note           {note}" for note in notes))
        if self.state.loss_settings is None:
            self.state.loss_settings = task.loss_settings
        self.state.dropout_by = dropout_by
        self.batches = train_batches(arguments, data, plan, run.launch)
        self.batches.begin(self.state.step, self.state.stream)
        validation = data.splits.get("validation")
        self.validation = None if validation is None else eval_rows(run, arguments, task, validation)
        self._prepare_model(model)
        if place is not None:
            checkpoint.load_weights(place, model)
        rates = {"learning_rate": plan.learning_rate, "scale_of": task.learning_rate_scale}
        build = partial(build_optimizer, arguments, **rates, device_type=run.device.type)
        self.model, self.optimizer = run.prepare(model, build)
        self.average = WeightAverage(run, self.model, arguments.ema_decay) if arguments.ema_decay else None
        if opened.replaces is not None:
            run.from_rank0(lambda: replace_run(self.folder, opened.replaces))
        elif place is not None:
            checkpoints = self.folder / checkpoint.FOLDER
            run.from_rank0(lambda: checkpoint.set_aside_later(checkpoints, self.state.step))
        self.tracker = Tracker(
            run.accelerator, self.folder, plan.total_steps, self.state.step, self.state.unevaluated
        )
        self.tracker.start_trackers(project_of(arguments, task.name), arguments.run_name, as_dict(arguments))
        if place is not None:
            if run.deepspeed_config is not None:  # its optimizers have no state before their first step
                self._idle_step()
            checkpoint.restore_optimizer(run, place, self.model, self.optimizer, self.state)
            if self.average is not None:
                self.average.restore(checkpoint.load_average(place))
            checkpoint.discard(run, place, opened.resume)

    def _train_occurring(self, model: torch.nn.Module) -> None:
        """Leaves the embeddings of tokens that do not occur out of the training."""
        embedding = train_occurring(model, self.task, self.run.is_main)
        if embedding is not None:
            name = next(name for name, weight in model.named_parameters() if weight is embedding.weight)
            rate = self.plan.learning_rate * self.task.learning_rate_scale(model, name)
            self.unused_decay_rate = rate * self.arguments.weight_decay
            embedding.decay = lambda: self.state.unused_decay
            self.run.print(f"embeddings     {embedding.in_words()}")

    def _prepare_model(self, model: torch.nn.Module) -> None:
        """Applies gradient checkpointing, kernels and compilation before Accelerate wraps the model; freezes
        parameters that the loss does not depend on; prints the memory estimate."""
        run, arguments, by_row = self.run, self.arguments, self.run.launch.dropout_by_row
        if run.device.type == "cuda":
            use_known_masks()
        if by_row:
            use_row_modules(model)
        run.print(
            "dropout        by row: the same masks under every launcher"
            if by_row
            else "dropout        by torch: another number of processes or micro-batches draws other masks "
            "(--dropout_by row)"
        )
        if by_row and any(isinstance(x, torch.nn.RNNBase) and x.dropout for x in model.modules()):
            run.print("note           dropout between the layers of an RNN is torch's, not by row")
        if found := switch_off_randomness(model):
            run.print(f"note           {' and '.join(found)}: off, as every process must do the same steps")
        if arguments.gradient_checkpointing or run.launch.recomputes_activations:
            checkpoint_activations(model, dropout_by_row=by_row)
        passed = run.from_rank0(partial(self._estimate_memory, model))
        if passed is not None:
            freeze_unused(model, passed)
        compiles = arguments.torch_compile or run.launch.torch_compile
        if compiles and run.launch.zero_stage == 3:
            # ZeRO-3's hooks around every module break the graph into hundreds of pieces, and torch recompiles
            # until it gives up.
            run.print("note           --torch_compile is ignored under ZeRO-3")
        elif compiles:
            compile_layers(model)

    def _estimate_memory(self, model: torch.nn.Module) -> DryRun | None:
        """Prints the estimate. None if the dry run fails."""
        layout = Layout(self.run.launch, self.plan.batch.accumulation, state_bytes(self.arguments, model))
        batch = self.batches.largest_micro_batch()  # an error in reading rows is not the model's
        try:
            passed = dry_run(model, self.task, batch, layout)
        except Exception as error:  # for example, the forward pass reads values of tensors
            reason = f"a dry run of the model fails ({type(error).__name__})"
            self.run.print(f"memory         no estimate: {reason}; weights without a gradient stay trained")
            return None
        self.run.print(*memory_lines(passed, layout))
        if passed.unused:
            count, example = len(passed.unused), min(passed.unused)
            unused = f"{count} weight(s) that the largest batch does not use, such as {example}"
            self.run.print(f"note           {unused}, stay as they are")
        return passed

    def _idle_step(self) -> None:
        """Does a step at learning rate 0, which creates the optimizer's state."""
        self.model.train()  # gradient checkpointing depends on it
        set_learning_rate(self.optimizer, 0.0)
        with buffers_kept(self.model):
            train_step(self.run, self.model, self.optimizer, self.task, self.batches[0], 0.0, weight=0.0)

    # The loop

    def fit(self) -> dict[str, float | None]:
        """Trains to the end of the plan, or until early stopping. Returns the train_* metrics.

        Raises `TrainingError` for a non-finite loss or gradient, before the step is saved, and
        `StopRequested` after a checkpoint if any process was requested to stop.
        """
        run, state, clock = self.run, self.state, StepClock(self.run.device)
        if self._is_complete() or self._out_of_patience():
            run.print(f"training       is complete ({state.step} steps); nothing to do")
            metrics = self._train_metrics(clock)
            return {k: value for k, value in metrics.items() if value is not None and k != "peak_memory_mb"}
        started = time.perf_counter()
        signals.defer()
        if stop_requested(run):
            stop_run(run, f"before step {state.step + 1}; there was nothing new to save")
        if self.description is not None and state.step < self.plan.total_steps:
            run.from_rank0(lambda: write_json(self.folder / RUN_FILE, self.description))
        self.model.train()
        additive = task_scripts.is_ours(type(self.task)) or self._losses_add_up()
        if additive:
            self._fit_into_memory()
        self.passes = self._recorded_passes()
        stopped_early = state.unevaluated and self._evaluate_and_save(eval_due=True)
        if not stopped_early:
            self._run_steps(clock)
        if stop_requested(run):
            self._save_and_stop(unevaluated=False)
        if self.plan.save_steps is None and self.tracker.first_step:
            self._save()  # otherwise a later start would go on from the checkpoint of an earlier stop
        self._wait_for_checkpoint()
        self.passes = None
        synchronise_buffers(run, self.model)
        signals.exit_with(EXIT_STOPPED)  # everything is on disk
        return {**self._train_metrics(clock), "train_fit_runtime": time.perf_counter() - started}

    def _losses_add_up(self) -> bool:
        with buffers_kept(self.model):
            adds_up = losses_add_up(self.run, self.model, self.task, self.batches.largest_micro_batch())
        self.model.train()
        return adds_up

    def _recorded_passes(self) -> Passes | None:
        """CUDA graphs, if they are wanted and can be recorded here."""
        run, arguments, launch = self.run, self.arguments, self.run.launch
        obstacles = {
            "on this device": run.device.type != "cuda",
            "under DDP, ZeRO and FSDP": run.unwrapped(self.model) is not self.model or run.fsdp is not None,
            "with --dropout_by row": launch.dropout_by_row,
            "with --gradient_checkpointing": arguments.gradient_checkpointing
            or launch.recomputes_activations,
            "in fp16": launch.precision == "fp16",
        }
        found = [words for words, present in obstacles.items() if present]
        if found and arguments.cuda_graphs == "true":
            run.print(f"note           --cuda_graphs is ignored {found[0]}")
        wanted = {"auto": self.task.replays_passes, "true": True, "false": False}[arguments.cuda_graphs]
        if found or not wanted:
            return None
        return Passes(partial(add_gradient, run, self.model, self.task), self.model, run.print)

    def _is_complete(self) -> bool:
        return self.state.step >= self.plan.total_steps and not self.state.unevaluated

    def _run_steps(self, clock: StepClock) -> None:
        """Trains, logs, evaluates and saves until the plan ends or patience runs out."""
        run, arguments, tracker = self.run, self.arguments, self.tracker
        on_gpu, profile = run.device.type == "cuda", arguments.profile if run.is_main else None
        loaded = (self.batches, self.state.step, arguments.dataloader_num_workers, on_gpu)
        tracker.progress.start()
        # Closed also after an error, which a notebook keeps, with this frame and so with the workers.
        with contextlib.closing(
            profiled(train_loader(*loaded), run.accelerator, profile, self.folder, tracker.say)
        ) as batches:
            self._train_on(batches, clock)

    def _train_on(self, batches: Iterator[list[Batch]], clock: StepClock) -> None:
        run, plan, state, tracker = self.run, self.plan, self.state, self.tracker
        unread: list[tuple] = []  # (loss, gradient norm) of steps that the host has not read from the device
        next_read = state.step
        pace, scale = 0.0, self._loss_scale()
        clock.mark()
        for micro_batches in batches:
            self.batches.enter(state.step)
            unread.append(self.do_step(micro_batches))
            state.count_tokens(*self.batches.tokens(state.step))
            state.step += 1
            previous_scale, scale = scale, self._loss_scale()
            self._count_update(scale < previous_scale)
            clock.mark()

            log_due = plan.due(state.step, plan.logging_steps)
            eval_due = self.validation is not None and plan.due(state.step, plan.eval_steps)
            save_due = plan.due(state.step, plan.save_steps)
            requested = False
            if log_due or eval_due or save_due or run.device.type in SYNCHRONOUS or state.step > next_read:
                norms, requested, mean_pace = self._read_losses(unread, pace)
                seconds = clock.read()
                state.train_seconds += seconds
                if self.forecast is None and len(clock.seconds) > FORECAST_STEPS:
                    self.forecast = self._forecast(clock.seconds)
                pace = seconds / len(norms)
                next_read = state.step + (int(READ_SECONDS / mean_pace) if mean_pace else 0)
            rows_per_step = plan.rows_before(state.step) / state.step
            tracker.advance(state.losses[-1] if state.losses else None, rows_per_step)
            if log_due:
                self._log(norms[-1], clock.seconds[-len(state.losses) :])
            if requested:
                self._save_and_stop(unevaluated=eval_due)
            if eval_due or save_due:
                with Phase("evaluating and saving", shown=False):  # keeps its time out of the training's rate
                    stops_early = self._evaluate_and_save(eval_due)
                if stops_early:
                    return
                clock.pause()
                clock.mark()

    def do_step(self, micro_batches: list[Batch]) -> tuple[torch.Tensor, Any]:
        """Does the optimizer step `state.step`, which it does not count. Returns the result of
        `train_step`."""
        run, arguments, optimizer = self.run, self.arguments, self.optimizer
        self.lr_multiplier = self.plan.lr_multiplier(self.state.updates)
        set_learning_rate(optimizer, self.lr_multiplier)
        seed_step(arguments.seed, self.state.step, run.launch.rank, run.launch.dropout_by_row)
        model, max_norm = self.model, arguments.max_grad_norm
        try:
            return train_step(run, model, optimizer, self.task, micro_batches, max_norm, passes=self.passes)
        except Exception as error:
            if unused := UNUSED.search(str(error)):
                raise TrainingError(self._unused(unused[1])) from error
            if not is_out_of_memory(error):
                raise
            if self.passes is None:
                raise TrainingError(self._out_of_memory(micro_batches, error)) from error
        # After the `except` block: in it, the exception keeps the step's tensors in memory, as graphs do.
        run.print("note           CUDA graphs are off: out of memory beside them")
        self.passes = None
        run.accelerator.sync_gradients = True
        optimizer.zero_grad()
        clear_device_cache(garbage_collection=True)
        return self.do_step(micro_batches)

    def _unused(self, numbers: str) -> str:
        """The message for weights without a gradient. `numbers`: DDP's, of parameters."""
        plain = self.run.unwrapped(self.model)
        trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
        names = [trained[int(number)] for number in numbers.split()]
        listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        return (
            f"step {self.state.step + 1}: {process_name()}: the loss does not depend on {listed}. Several "
            "processes need a gradient of each weight in every step: add 0 times the sum of such weights to "
            "the loss"
        )

    def _forecast(self, seconds: list[float]) -> float | None:
        """train_runtime, from the `seconds` of this process's first steps. None for a stream, which may no
        longer have their rows."""
        batches, first = self.batches, self.state.step - len(seconds) + 1
        if batches.split.stream is not None:
            return None
        work = sum(batches.work(step) for step in range(first, first + FORECAST_STEPS))
        left = (self.plan.total_steps - self.state.step) * batches.mean_work(first)
        return self.state.train_seconds + left * sum(seconds[1 : 1 + FORECAST_STEPS]) / work

    def _count_update(self, scale_fell: bool) -> None:
        """Counts the step as an update, or as skipped after an fp16 overflow."""
        run, state = self.run, self.state
        # A fused optimizer skips overflowed gradients itself, on the GPU. Accelerate checks only whether its
        # step was called.
        skipped = scale_fell if run.deepspeed_config is None else run.accelerator.optimizer_step_was_skipped
        if run.launch.precision != "fp16" or not skipped:
            state.unused_decay *= 1 - self.unused_decay_rate * self.plan.lr_multiplier(state.updates)
            state.updates += 1
            state.skipped_in_a_row = 0
            if self.average is not None:
                self.average.update(state.updates)
            return
        state.skipped_in_a_row += 1
        if state.skipped_in_a_row >= SKIPPED_LIMIT:
            raise TrainingError(
                f"step {state.step}: {SKIPPED_LIMIT} fp16 updates in a row overflowed and were skipped; "
                "use bf16, or a smaller --learning_rate"
            )

    def _loss_scale(self) -> float:
        """torch's fp16 loss scale, 1.0 without a scaler. Synchronises with the GPU."""
        scaler = self.run.accelerator.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def _read_losses(self, unread: list[tuple], pace: float) -> tuple[list[float], bool, float]:
        """Moves the losses of the `unread` steps into `state` with one synchronisation.

        Returns (gradient norms of these steps; whether any process was requested to stop; the processes' mean
        `pace`, seconds per step). Requests and paces travel with the losses in one all-reduce.
        """
        run, state, first = self.run, self.state, self.state.step - len(unread)
        dtype = torch.float64
        mine = torch.tensor([float(signals.requested() is not None), pace], dtype=dtype, device=run.device)
        sums = run.sum(torch.cat([torch.stack([loss.to(dtype) for loss, _ in unread]), mine])).tolist()
        *losses, requested, paces = sums
        norms = [float(norm) if norm is not None else math.nan for _, norm in unread]
        unread.clear()
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), first):
            # fp16 gradients may overflow: the loss scaler skips such steps. A non-finite loss is no overflow.
            if not math.isfinite(loss) or (not math.isfinite(norm) and run.launch.precision != "fp16"):
                raise TrainingError(self._not_finite(step, loss, norm))
        state.losses += losses
        for loss in losses:  # not sum(losses): rounding would depend on how many steps were read together
            state.loss_total += loss
        return norms, requested > 0, paces / run.launch.world_size

    def _not_finite(self, step: int, loss: float, norm: float) -> str:
        rows = sorted(int(row) for row in self.batches.rows(step))
        listed = ", ".join(map(str, rows[:32])) + (", ..." if len(rows) > 32 else "")
        problem = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        streamed = self.batches.split.stream is not None
        buffer = f" in buffer {self.plan.epoch_of(step)[0] + 1}" if streamed else ""
        return (
            f"step {step + 1}: {problem}; training rows of that batch{buffer} (0-based): {listed}. The step "
            "was not saved. Try a smaller --learning_rate, a longer --warmup_steps, --max_grad_norm 1, or "
            "bf16 instead of fp16"
        )

    def _log(self, norm: float, seconds: list[float]) -> None:
        """Logs the steps since the last log. `seconds`: of those that this start has done."""
        state, plan = self.state, self.plan
        event = {
            "step": state.step,
            "epoch": round(state.step / plan.steps_per_epoch, 6),
            "loss": sum(state.losses) / len(state.losses),
            "learning_rate": plan.learning_rate * self.lr_multiplier,
            "grad_norm": norm if math.isfinite(norm) else None,
        }
        state.losses.clear()
        rows = plan.rows_before(state.step) - plan.rows_before(state.step - len(seconds))
        speed = {"samples_per_second": rows / sum(seconds), "memory_mb": memory_mb(self.run.device)}
        self.tracker.log(event, speed=speed)

    # Evaluation and the best model

    def _evaluate_and_save(self, eval_due: bool) -> bool:
        """Evaluates and saves, if due. Returns whether training stops early."""
        self.state.unevaluated = False
        synchronise_buffers(self.run, self.model)
        stops_early = False
        try:
            if eval_due:
                started = time.perf_counter()
                if self.passes is not None:
                    self.passes.make_room()
                with averaged(self.average):
                    stops_early = self._evaluate()
                self.evaluation_stalls.append(time.perf_counter() - started)
        except StopRequested:
            self._save_and_stop(unevaluated=True)
        save_steps = self.plan.save_steps
        if self.plan.due(self.state.step, save_steps) or (stops_early and save_steps is not None):
            self._save()
        elif self.state.best_step == self.state.step and self.run.broadcast(self.arguments.mirror_to):
            self._wait_for_checkpoint()
            mirror.upload(self.folder)  # best/ has changed
        return stops_early

    def _evaluate(self) -> bool:
        """Evaluates the model and exports it if it is the best so far. Returns whether training stops
        early."""
        run, task, state, name = self.run, self.task, self.state, self.task.best_metric
        metrics, predictions = evaluate(run, self.model, task, self.validation, stoppable=True)
        event = {"step": state.step, "epoch": round(state.step / self.plan.steps_per_epoch, 6)}
        event |= {f"eval_{key}": value for key, value in metrics.items()}
        self.tracker.log(event, shown=tuple(f"eval_{key}" for key in task.headline_metrics))
        if task.on_evaluation is not None:
            task.on_evaluation(state.step, dict(metrics))  # which it may change
        if name not in metrics:  # one of --metrics, whose names were not known before
            raise InputError(
                f"--metric_for_best_model {name}: neither the task nor --metrics has such a metric; this "
                f"evaluation has {', '.join(metrics)}"
            )
        value, loss = metrics[name], metrics.get("loss")
        if value is not None and self._is_better(value, loss):
            state.best_metric, state.best_metric_name, state.best_loss = value, name, loss
            state.best_step, state.evaluations_without_best = state.step, 0
            self._export(predictions)
        else:
            state.evaluations_without_best += 1
        if not self._out_of_patience():
            return False
        found = "no better" if state.best_step is not None else "no defined"
        self.tracker.say(f"stopping early: {found} {name} in {state.evaluations_without_best} evaluations")
        return True

    def _is_better(self, value: float, loss: float | None) -> bool:
        """Whether a model is better than the best so far. The loss breaks ties: the F1 of rare labels may
        stay 0 for epochs while the model learns."""
        best, best_loss = self.state.best_metric, self.state.best_loss
        if value == best:
            return loss is not None and best_loss is not None and loss < best_loss
        return best is None or (value > best if self.greater_is_better else value < best)

    def _out_of_patience(self) -> bool:
        patience = self.arguments.early_stopping_patience
        return patience is not None and self.state.evaluations_without_best >= patience

    def _export(self, predictions: Predictions | None) -> None:
        """Writes best/, its entries of metrics.json, and samples and images for trackers. `predictions`: of
        the validation rows, on rank 0."""
        with Phase("exporting", shown=self.run.is_main):
            weights = checkpoint.full_weights(self.run, self.model)
            self.run.from_rank0(partial(self._write_best, weights, predictions))

    def _write_best(self, weights: dict[str, torch.Tensor], predictions: Predictions | None) -> None:
        """`_export` on rank 0."""
        task, plain = self.task, self.run.unwrapped(self.model)
        begin_best(self.folder, self.state.best_step)
        merge_metrics(self.folder, task.export(self.folder / BEST, plain, weights, predictions) or {})
        if predictions is not None:
            for name, preview in task.previews(predictions).items():
                if isinstance(preview, str):
                    self.tracker.text(name, preview)
                else:
                    show_image(self.run.accelerator, self.folder, name, preview, self.state.step)
            if "html" in self.arguments.report_to:
                save_best_predictions(self.folder, predictions)

    # Checkpoints

    def _save(self) -> None:
        """Copies the state to rank 0's host memory, once the previous checkpoint is written, and starts
        writing it. Raises `TrainingError` on every process if the previous one could not be written."""
        run, state, started = self.run, self.state, time.perf_counter()
        synchronise_buffers(run, self.model)
        state.stream = self.batches.start_at(state.step)
        upload = mirror.snapshot(self.folder, state.step)
        average = None if self.average is None else self.average.state()
        with Phase("saving", shown=run.is_main):
            run.from_rank0(self.writer.wait)
            files = checkpoint.collect(run, self.model, self.optimizer, state, average)
        if run.is_main:  # a copy of the state, because training goes on changing it
            self.writer.start(partial(self._write, copy.deepcopy(state), files, upload))
        self.save_stalls.append(time.perf_counter() - started)

    def _write(self, state: TrainState, files: dict[str, Any], upload: Callable[[Path], None]) -> None:
        folder, limit = self.folder / checkpoint.FOLDER, self.arguments.save_total_limit
        # The history must be on disk before a checkpoint of the same step.
        upload(checkpoint.write(folder, state, self.fingerprint, files, limit, self.tracker.flush))

    def _wait_for_checkpoint(self) -> None:
        """Waits until the checkpoint is on disk. Raises `TrainingError` on every process if it could not be
        written."""
        with Phase("saving", shown=self.run.is_main):
            self.run.from_rank0(self.writer.wait)

    def _save_and_stop(self, unevaluated: bool) -> NoReturn:
        self.state.unevaluated = unevaluated
        self._save()
        self._wait_for_checkpoint()
        # The other processes wait for this one.
        mirror.wait(min(mirror.STOP_SECONDS, self.arguments.ddp_timeout / 2))
        path = self.folder / checkpoint.FOLDER / f"step_{self.state.step}"
        saved = f"step {self.state.step} of {self.plan.total_steps} is saved in {path}"
        stop_run(self.run, f"{saved}; the same command with --resume_from_checkpoint auto goes on")

    # The end

    def finish(self) -> dict[str, Any]:
        """Exports the last model if no evaluation chose one. Returns best_* and the exported model's eval_*
        metrics."""
        state = self.state
        if state.best_step is None:
            state.best_step = state.step
            with averaged(self.average):
                self._export(None)
        self.tracker.close()
        self.run.wait()
        return self.run.from_rank0(self._best_metrics)

    def _best_metrics(self) -> dict[str, Any]:
        state = self.state
        status.saved(state.step)
        events = [event for event in read_history(self.folder) if event["step"] == state.best_step]
        metrics = {key: value for event in events for key, value in event.items() if key.startswith("eval_")}
        return {"best_step": state.best_step, "best_metric": state.best_metric, **metrics}

    def release(self) -> None:
        """Frees the training model's memory for the exported model."""
        self.batches.close()
        wrapped, self.model, self.optimizer, self.average = self.model, None, None, None
        if self.run.deepspeed_config is not None:
            wrapped.destroy()
        del wrapped
        self.run.accelerator.free_memory()

    def _train_metrics(self, clock: StepClock) -> dict[str, float | None]:
        state, seconds, stalls = self.state, self.state.train_seconds, self.save_stalls
        evaluations, times = self.evaluation_stalls, clock.seconds
        p50, p95 = np.quantile(times, (0.5, 0.95)).tolist() if times else (None, None)
        rows, of_tokens = self.plan.rows_before(state.step), {}
        if self.batches.has_tokens:
            tokens, padded = state.tokens, state.padded_tokens
            of_tokens = {
                "train_tokens_per_second": tokens / seconds if seconds and tokens is not None else None,
                "train_padding_share": 1 - tokens / padded if padded else None,
            }
        return {
            "train_loss": state.loss_total / state.step if state.step else None,
            "train_runtime": seconds,
            "train_samples_per_second": rows / seconds if seconds else None,
            **of_tokens,
            "train_step_time_p50": p50,
            "train_step_time_p95": p95,
            "train_save_stall": statistics.median(stalls) if stalls else None,
            "train_evaluation_stall": statistics.fmean(evaluations) if evaluations else None,
            "train_evaluation_rows": None if self.validation is None else len(self.validation),
            "train_runtime_forecast": self.forecast,
            "train_steps": state.step,
            "train_skipped_steps": state.step - state.updates,
            "peak_memory_mb": peak_memory_mb(self.run.device),
        }

    # Memory

    def _fit_into_memory(self) -> None:
        """Tries the largest micro-batch before the first step. While it does not fit, halves the
        micro-batches of all processes; the global batch does not change, so the training is the same.

        Processes try it alone, without exchanging gradients. Under ZeRO and FSDP, one that fails would leave
        the others waiting, and batch norm's statistics depend on the micro-batch: such a run ends with the
        message of `_out_of_memory` instead.
        """
        run, halvings = self.run, 0
        has_batch_norm = any(map(has_statistics, self.model.modules()))
        if run.deepspeed_config is not None or run.fsdp is not None or has_batch_norm:
            return
        batch = self.batches.largest_micro_batch()
        while run.any(not self._fits(batch)):
            self.plan = self.batches.plan = replace(self.plan, batch=self.plan.batch.halved())
            batch = self.batches.largest_micro_batch()
            halvings += 1
        if halvings:
            tokens = self.plan.batch.max_tokens
            share = f"{len(batch.rows)} rows" if tokens is None else f"{tokens} tokens"
            note = f"micro-batches have at most {share}; the global batch does not change"
            run.print(f"note           out of memory: {note}")
            status.cut_micro_batches(2**halvings)

    def _fits(self, batch: Batch) -> bool:
        """Whether a forward and a backward pass fit. Raises `TrainingError` if not even one row does."""
        run, model, error_message = self.run, self.model, None
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # The optimizer has its state only after the first update; the average of the weights is there.
        own = replace(self.arguments, ema_decay=None)
        reserved = 0 if self.optimizer.state else round(state_bytes(own, model) * trained)
        try:
            with buffers_kept(model), run.accelerator.no_sync(model):
                state = torch.empty(reserved, dtype=torch.uint8, device=run.device)
                with dropout_by_row(batch.lengths, batch.places):
                    loss = self.task.loss_sum(model, batch.to(run.device, input_dtype(run, model)))
                run.accelerator.backward(loss)
                del state
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            error_message = self._out_of_memory([batch], error)
        # After the `except` block: in it, the exception keeps the step's tensors in memory.
        run.accelerator.sync_gradients = True  # otherwise Accelerate's optimizer keeps the gradients
        self.optimizer.zero_grad()
        if error_message is None:
            return True
        if len(batch.rows) == 1:
            raise TrainingError(error_message)
        clear_device_cache(garbage_collection=True)
        return False

    def _out_of_memory(self, micro_batches: list[Batch], error: Exception) -> str:
        rows, *sizes = max((batch.shape for batch in micro_batches), key=torch.Size.numel)
        size = f"--global_batch_size {self.plan.batch.global_batch_size}"
        smaller = f"a smaller --per_device_train_batch_size beside {size}, " if rows > 1 else ""
        advice = f"{smaller}{self.task.memory_advice}--gradient_checkpointing, --mixed_precision bf16"
        return (
            f"step {self.state.step + 1}: out of memory on a batch of {rows} rows x "
            f"{'x'.join(map(str, sizes))}. Try {advice}, or a ds_configs/zero*.json file ({in_short(error)})"
        )


# The step


def train_step(
    run: Run,
    model: Any,
    optimizer: Any,
    task: Task,
    micro_batches: list[Batch],
    max_grad_norm: float,
    *,
    weight: float = 1.0,
    passes: Passes | None = None,
) -> tuple[torch.Tensor, Any]:
    """One optimizer step over this process's micro-batches of one global batch.

    Returns (this process's part of the global mean loss: the parts of all processes add up to it; the norm of
    the full gradient before clipping). `weight`: of the gradient; 0 makes it zero. `passes`: replays passes
    that were recorded.
    """
    accelerator, dtype = run.accelerator, input_dtype(run, model)
    batches = [batch.to(run.device, dtype) for batch in micro_batches]
    targets = run.sum(torch.stack([task.num_targets(batch) for batch in batches]).sum()).clamp(min=1)
    scale = weight * accelerator.gradient_accumulation_steps * run.launch.world_size / targets
    loss, random_state = torch.zeros((), device=run.device), torch.get_rng_state()
    for position, batch in enumerate(batches, 1):
        if batch.places is not None:  # a call of dropout draws the same number in each micro-batch
            torch.set_rng_state(random_state)
        # Not `accumulate()`: it relies on the dataloader's end, which is wrong when batches are prefetched.
        accelerator.sync_gradients = last = position == len(batches)
        with nullcontext() if last else accelerator.no_sync(model):
            loss += (passes or partial(add_gradient, run, model, task))(batch, scale)
    if isinstance(model, DistributedDataParallel):
        model._check_reducer_finalized()  # DDP itself would tell in the next step, after a wrong update
    with record_function("optimizer"):
        if run.deepspeed_config is not None:
            norm = model.get_global_grad_norm()  # the step clips
        else:
            norm = _clip(run, model, max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=passes is None)
    return loss / targets, norm


def add_gradient(run: Run, model: Any, task: Task, batch: Batch, scale: torch.Tensor) -> torch.Tensor:
    """A forward and a backward pass: adds the gradient of the loss, times `scale`, and returns the loss."""
    with record_function("forward"), dropout_by_row(batch.lengths, batch.places):
        loss_sum = task.loss_sum(model, batch)
    machines.progress()
    with record_function("backward"):
        run.accelerator.backward(loss_sum * scale)
    return loss_sum.detach().float()


def _clip(run: Run, model: Any, max_norm: float) -> torch.Tensor:
    """Clips gradients and returns their norm before. `Accelerator.clip_grad_norm_` always multiplies all
    gradients, if only by 1, so that the host need not wait for a GPU's norm. On a CPU this pass is skipped if
    the norm is small."""
    if run.device.type not in SYNCHRONOUS:
        return fsdp.full_tensor(run.accelerator.clip_grad_norm_(model.parameters(), max_norm))
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    # Of rows first: on a CPU, torch sums the squares of a whole tensor one after the other in fp32, which
    # loses 1e-5 of the norm of a million elements and 6e-4 of sixteen million. DeepSpeed sums in fp64.
    gradients = [parameter.grad for parameter in parameters]
    rows = [torch.linalg.vector_norm(g, dim=tuple(range(1, g.ndim)) or None) for g in gradients]
    norm = fsdp.full_tensor(torch.nn.utils.get_total_norm(rows))
    if not norm <= max_norm:  # true for NaN
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def seed_step(seed: int, step: int, rank: int, dropout_by_row: bool) -> None:
    """Makes dropout a function of (seed, step), or of (seed, step, rank) if it is torch's, so that
    checkpoints need no random state. A GPU's own generator always depends on the rank. numpy and Python's
    `random` are for models and losses that draw by them."""
    place = [seed, step] if dropout_by_row else [seed, step, rank]
    number = _random_number(place)
    random.seed(number)
    np.random.seed(number % 2**32)
    if torch.accelerator.is_available():
        torch.manual_seed(_random_number([seed, step, rank]))
    # Alone it saves 0.2 ms: manual_seed visits every kind of device.
    torch.default_generator.manual_seed(number)


def _random_number(place: list[int]) -> int:
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)


def train_batches(arguments: Any, data: Data, plan: Plan, launch: Launch) -> TrainBatches:
    """The training batches of this process by optimizer step."""
    a, by_row = arguments, launch.dropout_by_row
    return TrainBatches(data.splits["train"], plan, launch.rank, a.seed, a.length_grouping, by_row)


@contextlib.contextmanager
def buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restores the model's buffers afterwards: a forward pass changes batch norm's statistics."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


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
