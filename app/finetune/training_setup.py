"""What stands before and behind `training.loop.fit`: model and optimizer prepared, the best model exported and loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from finetune.arguments.parsing import as_dict
from finetune.batching.batches import EvalRows, TrainSteps
from finetune.checkpoints import checkpoint, local_copy, saving
from finetune.checkpoints.checkpoint import TrainState
from finetune.kernels.compiling import compile_layers
from finetune.kernels.embeddings import keep_gradients
from finetune.launching.processes import Run
from finetune.memory.dry_run import dry_run
from finetune.memory.estimate import memory_lines
from finetune.memory.layout import Layout, layout_of
from finetune.opened_run import OpenedRun
from finetune.output import status
from finetune.output.progress import Phase
from finetune.output.run_folder import BEST, merge_metrics
from finetune.plan import Plan, evaluation_batch
from finetune.reports import final_report
from finetune.reports.tracker import Tracker, project_of, read_history
from finetune.task import Data, Predictions, Split, Task
from finetune.training import loop
from finetune.training.average import WeightAverage, averaged
from finetune.training.best_models import BestModels, check_space
from finetune.training.gradient_checkpointing import checkpoint_activations
from finetune.training.optimizer import build_optimizer, state_bytes
from finetune.training.training import FitOptions, Training


def prepare_training(
    run: Run, arguments: Any, task: Task, data: Data, plan: Plan, model: torch.nn.Module, *, opened: OpenedRun
) -> tuple[Training, TrainState]:
    """Hands model and optimizer to Accelerate and restores the checkpoint to resume from, if there is one."""
    state, place, resume = TrainState(), None, opened.resume
    folder = Path(arguments.output_dir)
    if resume is not None:
        place = local_copy.fetch(run, resume, arguments.shared_output_dir)
        state = checkpoint.load_state(place, opened.fingerprint)
        checkpoint.load_weights(place, model)
        _forget_lost_best(run, folder, state)
        if state.step < plan.total_steps or state.unevaluated:  # else there is nothing left to compare with
            _compare_by(run, folder, task.best_metric, state)
    run.on_main(partial(check_space, folder, arguments, model, state_bytes(arguments, model)))
    steps = train_steps(arguments, data, plan, run.launch.rank)
    steps.begin(state.step, state.stream)
    prepare_model(run, arguments, task, plan, model, steps)
    rate, scale_of = plan.learning_rate, task.learning_rate_scale
    build = partial(build_optimizer, arguments, learning_rate=rate, scale_of=scale_of, device_type=run.device.type)
    prepared, optimizer = run.prepare(model, build)
    if opened.replace is not None:
        run.on_main(opened.replace)
    tracker = Tracker(run.accelerator, folder, plan.total_steps, state.step, resume is not None)
    tracker.start_trackers(project_of(arguments, task.name), arguments.run_name, as_dict(arguments))
    training = Training(
        model=prepared,
        optimizer=optimizer,
        task=task,
        plan=plan,
        options=fit_options(arguments, task),
        steps=steps,
        validation=eval_rows(run, arguments, task, data.splits["validation"]) if "validation" in data.splits else None,
        tracker=tracker,
        output_dir=folder,
        fingerprint=opened.fingerprint,
        export=partial(export_best, run, folder, task, prepared, tracker, keeps_predictions="html" in arguments.report_to),
        best_models=best_models(run, arguments, task, prepared),
        average=WeightAverage(run, prepared, arguments.ema_decay) if arguments.ema_decay else None,
    )
    if resume is not None:
        loop.restore(run, place, training, state)
        training.best_models.forget_lost(state)
        if checkpoint.is_sharded(place) and arguments.checkpoint_format == "full":
            _convert(run, training, state)
        local_copy.discard(run, place, resume)
    return training, state


def prepare_model(run: Run, arguments: Any, task: Task, plan: Plan, model: torch.nn.Module, steps: TrainSteps) -> None:
    """What is done to a model before Accelerate gets it; prints the memory that training it will need."""
    if arguments.gradient_checkpointing or run.launch.recomputes_activations:
        checkpoint_activations(model)
    layout = layout_of(run.launch, plan.batch, arguments.kernels, state_bytes(arguments, model))
    if run.is_main:
        run.print(*_memory(task, model, steps, layout))
    if layout.keeps_embeddings:
        keep_gradients(model)
    compiles = arguments.torch_compile or run.launch.torch_compile
    if compiles and run.launch.zero_stage == 3:
        # ZeRO-3 gathers and frees weights around every module: hundreds of pieces, each compiled anew until torch gives up.
        run.print("note           --torch_compile is left out under ZeRO-3")
    elif compiles:
        compile_layers(model)


def _memory(task: Task, model: torch.nn.Module, steps: TrainSteps, layout: Layout) -> list[str]:
    try:
        return memory_lines(dry_run(model, task, steps.largest_micro_batch(), layout), layout)
    except Exception as error:  # a model that looks at values in its forward pass is no reason to stop
        return [f"memory         not known in advance: a dry run of the model fails ({type(error).__name__})"]


def train_steps(arguments: Any, data: Data, plan: Plan, rank: int) -> TrainSteps:
    """A process's batches by optimizer step."""
    return TrainSteps(data.splits["train"], plan, rank, arguments.seed, arguments.length_grouping, data.padding_free)


def eval_rows(run: Run, arguments: Any, task: Task, split: Split) -> EvalRows:
    """A file to be evaluated, longest rows first."""
    by_tokens = task.evaluates_by_tokens and run.device.type == "cpu"
    return EvalRows(split, *evaluation_batch(arguments, by_tokens))


def fit_options(arguments: Any, task: Task) -> FitOptions:
    """The arguments that the loop looks at."""
    greater = arguments.greater_is_better
    return FitOptions(
        seed=arguments.seed,
        max_grad_norm=arguments.max_grad_norm,
        best_metric=task.best_metric,
        greater_is_better=greater if greater is not None else "loss" not in task.best_metric,
        early_stopping_patience=arguments.early_stopping_patience,
        save_total_limit=arguments.save_total_limit,
        dataloader_num_workers=arguments.dataloader_num_workers,
        profile=arguments.profile,
        in_shards=arguments.checkpoint_format == "sharded",
    )


def best_models(run: Run, arguments: Any, task: Task, model: Any) -> BestModels:
    """What keeps the best models that the arguments ask for."""
    return BestModels(
        run=run,
        folder=Path(arguments.output_dir),
        task=task,
        model=model,
        greater_is_better=fit_options(arguments, task).greater_is_better,
        keep_best=arguments.keep_best,
        average=arguments.average_checkpoints,
        shared_output_dir=arguments.shared_output_dir,
    )


def export_best(
    run: Run,
    folder: Path,
    task: Task,
    model: Any,
    tracker: Tracker,
    best: Predictions | None,
    *,
    keeps_predictions: bool = False,
) -> None:
    """Writes best/, what the export adds to metrics.json, samples and pictures for TensorBoard; `keeps_predictions`: for the
    report. All processes must call it."""
    with Phase("exporting", shown=run.is_main):
        weights = saving.full_weights(run, model)
        run.on_main(partial(_export, folder, task, run.unwrapped(model), weights, tracker, best))
        if keeps_predictions:
            run.on_main(partial(_keep_predictions, folder, best))


def _export(
    folder: Path, task: Task, model: Any, weights: dict[str, torch.Tensor], tracker: Tracker, best: Predictions | None
) -> None:
    merge_metrics(folder, task.export(folder / BEST, model, weights, best))
    for tag, markdown in (task.samples(best) if best is not None else {}).items():
        tracker.text(tag, markdown)
    for name, picture in (task.pictures(best) if best is not None else {}).items():
        tracker.picture(name, picture)


def _keep_predictions(folder: Path, best: Predictions | None) -> None:
    """`best`: of a model that was evaluated."""
    if best is not None:
        final_report.save_best_predictions(folder, best)


def load_best(run: Run, arguments: Any, load: Callable[[Path], Any]) -> Any:
    """What `load` makes of best/, on every process; machines that do not see rank 0's folder get a copy for the time."""
    folder = Path(arguments.output_dir) / BEST
    place = local_copy.fetch(run, folder, arguments.shared_output_dir)
    try:
        return load(place)
    finally:
        local_copy.discard(run, place, folder)


def finish_training(run: Run, training: Training, state: TrainState) -> dict[str, Any]:
    """Exports the last model if no evaluation chose one; returns best_* and the best model's eval_* metrics."""
    if state.best_step is None:
        state.best_step = state.step
        with averaged(training.average):
            training.export(None)
    found = {}
    if training.best_models.average is not None:
        found = training.best_models.export_mean(state, training.validation, training.export)
    training.tracker.close()
    run.wait()
    return run.on_main(partial(_best_metrics, training.output_dir, state)) | found


def _best_metrics(folder: Path, state: TrainState) -> dict[str, Any]:
    status.saved(state.step)
    events = [event for event in read_history(folder) if event["step"] == state.best_step]
    metrics = {key: value for event in events for key, value in event.items() if key.startswith("eval_")}
    return {"best_step": state.best_step, "best_metric": state.best_metric, **metrics}


def release(run: Run, training: Training) -> None:
    """Lets go of the training model, so that the exported one has room on the device."""
    training.steps.close()
    wrapped = training.model
    training.model = training.optimizer = training.export = training.best_models = training.average = None
    if run.deepspeed_config is not None:
        wrapped.destroy()
    del wrapped
    run.accelerator.free_memory()  # empties the device's cache


def _convert(run: Run, training: Training, state: TrainState) -> None:
    """Writes a checkpoint in shards anew for every launch, before another step: the training may be complete."""
    loop.save(run, training, state, in_shards=False)
    loop.wait_for_checkpoint(run, training)
    run.print(f"note           checkpoint step_{state.step}, which was in shards, is one for every launch now")


def _forget_lost_best(run: Run, folder: Path, state: TrainState) -> None:
    """Lets the best model be chosen anew where the one that the checkpoint remembers is not (it belongs to another folder's
    run) or is damaged. Rank 0 looks, since machines may not share the folder and must agree."""
    problem = run.on_main(partial(_problem_of_best, folder)) if state.best_step is not None else None
    if problem is None:
        return
    run.print(f"note           the best model, of step {state.best_step}, {problem}; the best from here on is kept")
    state.best_metric, state.best_step, state.evaluations_without_best, state.kept = None, None, 0, []


def _problem_of_best(folder: Path) -> str | None:
    if not (folder / BEST).is_dir():
        return f"is not in {folder}"
    for file in (folder / BEST).glob("*.safetensors"):
        try:
            with safe_open(file, "pt"):  # compares the size of the file with its header
                pass
        except (OSError, SafetensorError):
            return f"is damaged: {file} cannot be read"
    return None


def _compare_by(run: Run, folder: Path, metric: str, state: TrainState) -> None:
    """Lets the best model so far be judged by another metric than the one that chose it: by its value in the history. Without
    one, the best model is chosen anew."""
    if state.best_step is None or state.best_metric_name == metric:
        return
    value, *others = run.on_main(
        lambda: [_evaluated(folder, f"eval_{metric}", step) for step in (state.best_step, *(e["step"] for e in state.kept))]
    )
    state.kept = [{**e, "metric": other} for e, other in zip(state.kept, others, strict=True) if None not in (value, other)]
    by = f"the best model so far, of step {state.best_step}, was chosen by {state.best_metric_name}"
    if value is None:
        run.print(f"note           {by}, and has no {metric}; the best by {metric} from here on is kept")
        state.best_step = None
    else:
        run.print(f"note           {by}; from here on {metric} decides, which is {value:.4f} there")
    state.best_metric, state.best_metric_name, state.evaluations_without_best = value, metric, 0


def _evaluated(folder: Path, name: str, step: int) -> float | None:
    """The value that the history has for a metric of the evaluation at this step."""
    return next((event[name] for event in read_history(folder) if event["step"] == step and name in event), None)
