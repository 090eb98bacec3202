"""A run from its folder to its files: what every task does around `loop.fit`. Level 9."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune import memory_estimate
from finetune.arguments.parsing import as_dict
from finetune.checkpoints import checkpoint, local_copy, saving, shards
from finetune.checkpoints.checkpoint import TrainState
from finetune.errors import InputError
from finetune.kernels.compiling import compile_layers
from finetune.kernels.embeddings import keep_gradients
from finetune.launching import signals
from finetune.launching.launch import Launch
from finetune.launching.processes import Run, in_force
from finetune.output import run_folder, status
from finetune.output.run_folder import BEST
from finetune.output.versions import library_versions
from finetune.plan import Plan, describe
from finetune.reports.tracker import Tracker, read_history
from finetune.training import loop
from finetune.training.gradient_checkpointing import checkpoint_activations
from finetune.training.loop import FitOptions, Training
from finetune.training.optimizer import build_optimizer


def make_identity(arguments: Any, plan: Plan | None, of_task: dict[str, Any]) -> dict[str, Any]:
    """What must be equal on every machine, and for a checkpoint to be this run's: the task's part and the order of rows."""
    if plan is None:
        return of_task
    order = {"global_batch_size": plan.batch.global_batch_size, "length_grouping": arguments.length_grouping}
    return {**of_task, **order, "seed": arguments.seed}


@dataclass(frozen=True)
class Opening:
    """A folder that a run has taken.

    `resume`: the checkpoint to go on from; `replace`, for rank 0: removes the run that --overwrite_output_dir gives up. That is
    the last thing before the training: a model that does not fit on its device, or into DeepSpeed, must not cost it.
    """

    resume: Path | None
    replace: Callable[[], None] | None


def open_run(
    run: Run,
    arguments: Any,
    plan: Plan | None,
    identity: dict[str, Any],
    notes: list[str],
    details: dict[str, Any] | None = None,
) -> Opening:
    """Compares the processes' data, takes the folder, prints what is asked and what is in force, writes run.json.

    `identity` (see `make_identity`) may not change over a resume; `details` is what the task wants in run.json besides.
    """
    _compare_processes(run, identity)
    folder = Path(arguments.output_dir)

    def begin(step: int) -> None:
        description = {**_description(run, arguments, plan, identity), **(details or {})}
        run_folder.write_json(folder / run_folder.RUN_FILE, description)
        status.begin(folder, step)
        signals.on_end(status.stopped)

    def replace() -> None:
        run_folder.clear(folder)
        begin(0)

    def take() -> tuple[Path | None, bool]:
        global _lock  # held until the process ends
        _lock = run_folder.lock(folder)
        if plan is None:
            return None, False
        restarted = run_folder.was_restarted(folder)
        resume = "auto" if restarted else arguments.resume_from_checkpoint
        holds_a_run = run_folder.holds_a_run(folder)
        if arguments.overwrite_output_dir and not restarted and holds_a_run:
            return None, True
        if not holds_a_run:
            run_folder.clear(folder)
        run_folder.recover_folder(folder / BEST)
        checkpoint.tidy(folder / checkpoint.FOLDER)
        found, step = None, 0
        if resume is not None:
            found = checkpoint.find(folder / checkpoint.FOLDER, resume)
            if found is not None:
                step = checkpoint.load_state(found, identity).step
                if checkpoint.is_in_shards(found):
                    shards.check_launch(found, run.launch)
        begin(step)
        return found, False

    signals.limit(arguments.max_train_time)
    found, replaces = run.on_main(take)
    if arguments.shared_output_dir:
        local_copy.check_shared(run, folder)
    lines = [*in_force(run), *(describe(plan) if plan else [])]
    if arguments.test_file is not None and not arguments.do_predict:
        notes = [*notes, f"--test_file {arguments.test_file} is not read: --do_predict is not given"]
    lines += [f"note           {note}" for note in notes]
    if plan and (found is not None or arguments.resume_from_checkpoint is not None):
        lines.append(f"resume         {found or 'no checkpoint yet, starting from the beginning'}")
    run.print(*lines)
    return Opening(found, replace if replaces else None)


def prepare_training(
    run: Run,
    arguments: Any,
    plan: Plan,
    model: Any,
    make: Callable[[Any, Any, Tracker], Training],
    opening: Opening,
    identity: dict[str, Any],
) -> tuple[Training, TrainState]:
    """Hands model and optimizer to Accelerate and puts a checkpoint's state back. `make` builds the `Training` from the
    prepared model, the prepared optimizer and the tracker."""
    state, place, resume = TrainState(), None, opening.resume
    if resume is not None:
        place = local_copy.fetch(run, resume, arguments.shared_output_dir)
        state = checkpoint.load_state(place, identity)
        checkpoint.load_weights(place, model)
        _forget_lost_best(run, Path(arguments.output_dir), state)
    if arguments.gradient_checkpointing:
        checkpoint_activations(model)
    if run.is_main:
        run.print(*_memory(run.launch, plan, model, make))
    if memory_estimate.layout_of(run.launch, plan.batch).keeps_embeddings:
        keep_gradients(model)
    if arguments.torch_compile and run.launch.zero_stage == 3:
        # It gathers and frees weights around every module: hundreds of pieces, each compiled anew until torch gives up.
        run.print("note           --torch_compile is left out under ZeRO-3")
    elif arguments.torch_compile:
        compile_layers(model)
    head = getattr(arguments, "head_learning_rate", None)
    scale = head / arguments.learning_rate if head else 1.0
    optimizer = build_optimizer(arguments, model, plan.learning_rate, scale)
    prepared, optimizer = run.accelerator.prepare(model, optimizer)
    if opening.replace is not None:
        run.on_main(opening.replace)
    folder = Path(arguments.output_dir)
    tracker = Tracker(run.accelerator, folder, plan.total_steps, state.step, resume is not None)
    tracker.start_trackers(arguments.run_name, as_dict(arguments))
    training = make(prepared, optimizer, tracker)
    if resume is not None:
        loop.restore(run, place, training, state)
        if checkpoint.is_in_shards(place) and arguments.checkpoint_format == "full":
            _convert(run, training, state, arguments.save_total_limit)
        local_copy.discard(run, place, resume)
    return training, state


def _convert(run: Run, training: Training, state: TrainState, limit: int) -> None:
    """Writes a checkpoint anew for every launch, before a step more is made: the training may be complete."""
    loop.save(run, training, state, limit, in_shards=False)
    saving.wait(run, training.writer)
    run.print(f"note           checkpoint step_{state.step}, which was in shards, is one for every launch now")


def _memory(launch: Launch, plan: Plan, model: Any, make: Callable) -> list[str]:
    """What the training will need, told before anything of it is on a device. A model that cannot be rehearsed is no reason
    to stop."""
    parts = make(model, None, None)
    layout = memory_estimate.layout_of(launch, plan.batch)
    try:
        rehearsed = memory_estimate.rehearse(model, parts.task, memory_estimate.largest_batch(parts.steps), layout)
    except Exception as error:
        return [f"memory         not known in advance: the model cannot be rehearsed ({type(error).__name__})"]
    return memory_estimate.memory_lines(rehearsed, layout)


def load_best(run: Run, arguments: Any, load: Callable[[Path], Any]) -> Any:
    """What `load` makes of best/, on every process; machines that do not see rank 0's folder get a copy for the time."""
    folder = Path(arguments.output_dir) / BEST
    place = local_copy.fetch(run, folder, arguments.shared_output_dir)
    try:
        return load(place)
    finally:
        local_copy.discard(run, place, folder)


def _forget_lost_best(run: Run, folder: Path, state: TrainState) -> None:
    """Lets the best model be chosen anew where the one that the checkpoint remembers is not: it belongs to another folder's
    run. Asked on rank 0 only, since machines may not share the folder and must agree."""
    if state.best_step is None or run.on_main((folder / BEST).is_dir):
        return
    run.print(f"note           the best model, of step {state.best_step}, is not in {folder}; the best from here on is kept")
    state.best_metric, state.best_step, state.evaluations_without_best = None, None, 0


def fit_options(arguments: Any, headline: str, shown: tuple[str, ...]) -> FitOptions:
    """The arguments that the loop looks at. `headline`: the figure that decides which model is best; `shown`: the evaluation
    figures that go to the console."""
    a = arguments
    greater = a.greater_is_better if a.greater_is_better is not None else "loss" not in headline
    return FitOptions(
        seed=a.seed,
        max_grad_norm=a.max_grad_norm,
        headline=headline,
        greater_is_better=greater,
        early_stopping_patience=a.early_stopping_patience,
        save_total_limit=a.save_total_limit,
        dataloader_num_workers=a.dataloader_num_workers,
        shown=shown,
        profile=a.profile,
        in_shards=a.checkpoint_format == "sharded",
    )


def finish_training(run: Run, training: Training, state: TrainState) -> dict[str, Any]:
    """Exports the last model if no evaluation chose one; returns best_* and the best model's eval_* figures."""
    if state.best_step is None:
        state.best_step = state.step
        training.on_best(None, {})
    training.tracker.close()
    run.wait()

    def best_figures() -> dict[str, Any]:
        status.saved(state.step)
        events = [e for e in read_history(training.output_dir) if e["step"] == state.best_step]
        figures = {key: value for event in events for key, value in event.items() if key.startswith("eval_")}
        return {"best_step": state.best_step, "best_metric": state.best_metric, **figures}

    return run.on_main(best_figures)


def release(run: Run, training: Training) -> None:
    """Lets go of the training model, so that the exported one has room on the device."""
    import torch

    engine_or_model = training.model
    training.model = training.optimizer = None
    if run.deepspeed_config is not None:
        engine_or_model.destroy()
    del engine_or_model
    run.accelerator.free_memory()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()


def _compare_processes(run: Run, identity: dict[str, Any]) -> None:
    everyone = run.gather([(run.launch.rank, platform.node(), identity)])
    _, first_host, first = everyone[0]
    found = [
        f"rank {rank} on {host}: {key} is {other.get(key)!r:.60} but {value!r:.60} on rank 0 ({first_host}); every machine "
        "needs the same files and arguments"
        for rank, host, other in everyone
        for key, value in first.items()
        if other.get(key) != value
    ]
    if found:
        raise InputError(*found)


def _description(run: Run, arguments: Any, plan: Plan, identity: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    launch = run.launch
    return {
        "arguments": as_dict(arguments),
        "launcher": launch.launcher,
        "launcher_process": os.getppid(),
        "world_size": launch.world_size,
        "device": run.device.type,
        "backend": launch.backend,
        "mixed_precision": launch.precision,
        "zero_stage": launch.zero_stage,
        "deepspeed_file": launch.deepspeed_file,
        "deepspeed_config": _plain(run.deepspeed_config),
        "plan": asdict(plan),
        "identity": identity,
        "versions": library_versions(),
    }


def _plain(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """DeepSpeed's and Accelerate's additions include infinities, which JSON has no word for."""
    return None if config is None else json.loads(json.dumps(config, default=str).replace("Infinity", '"inf"'))
