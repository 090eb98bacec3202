"""Setup of a training for `training.loop.fit`, and export and loading of its best model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from samerun import checkpoint
from samerun.batching.batches import EvalRows, TrainSteps
from samerun.checkpoint import TrainState
from samerun.kernels.embeddings import reuse_gradient_memory
from samerun.layers import checkpoint_activations, compile_layers
from samerun.memory.dry_run import dry_run
from samerun.memory.estimate import memory_lines
from samerun.memory.layout import Layout, layout_of
from samerun.opened_run import OpenedRun
from samerun.output import status
from samerun.output.files import as_json
from samerun.output.progress import Phase
from samerun.output.run_folder import BEST, METRICS, begin_best, merge_metrics, read_metrics
from samerun.parsing import as_dict
from samerun.plan import Plan, evaluation_batch
from samerun.reports import final_report
from samerun.reports.tracker import Tracker, project_of, read_history
from samerun.runtime import Run
from samerun.task import Data, Predictions, Split, Task, higher_is_better
from samerun.training import loop
from samerun.training.average import WeightAverage, averaged
from samerun.training.best_models import BestModels, check_space
from samerun.training.optimizer import build_optimizer, state_bytes
from samerun.training.training import FitOptions, Training


def prepare_training(
    run: Run, arguments: Any, task: Task, data: Data, plan: Plan, model: torch.nn.Module, *, opened: OpenedRun
) -> tuple[Training, TrainState]:
    """Prepares model and optimizer with Accelerate and restores the checkpoint to resume from, if there is
    one."""
    state, place, resume = TrainState(), None, opened.resume
    folder = Path(arguments.output_dir)
    if resume is not None:
        place = checkpoint.fetch(run, resume, arguments.shared_output_dir)
        state = checkpoint.load_state(place, opened.fingerprint)
        checkpoint.load_weights(place, model)
        _forget_missing_best(run, folder, state)
        if state.step < plan.total_steps or state.unevaluated:  # otherwise no evaluation is left
            _forget_other_losses(run, task, state)
            _switch_best_metric(run, folder, task.best_metric, state)
    if state.loss_settings is None:
        state.loss_settings = task.loss_settings
    run.on_main(partial(check_space, folder, arguments, model, state_bytes(arguments, model)))
    steps = train_steps(arguments, data, plan, run.launch.rank)
    steps.begin(state.step, state.stream)
    prepare_model(run, arguments, task, plan, model, steps)
    rate, scale_of = plan.learning_rate, task.learning_rate_scale
    build = partial(
        build_optimizer, arguments, learning_rate=rate, scale_of=scale_of, device_type=run.device.type
    )
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
        validation=eval_rows(run, arguments, task, data.splits["validation"])
        if "validation" in data.splits
        else None,
        tracker=tracker,
        output_dir=folder,
        fingerprint=opened.fingerprint,
        export=partial(
            export_best, run, folder, task, prepared, tracker, keeps_predictions="html" in arguments.report_to
        ),
        best_models=best_models(run, arguments, task, prepared),
        average=WeightAverage(run, prepared, arguments.ema_decay) if arguments.ema_decay else None,
    )
    if resume is not None:
        loop.restore(run, place, training, state)
        training.best_models.forget_missing(state)
        checkpoint.discard(run, place, resume)
    return training, state


def prepare_model(
    run: Run, arguments: Any, task: Task, plan: Plan, model: torch.nn.Module, steps: TrainSteps
) -> None:
    """Applies gradient checkpointing, kernels and compilation before Accelerate wraps the model; prints the
    memory estimate."""
    if arguments.gradient_checkpointing or run.launch.recomputes_activations:
        checkpoint_activations(model)
    layout = layout_of(run.launch, plan.batch, arguments.kernels, state_bytes(arguments, model))
    if run.is_main:
        run.print(*_memory(task, model, steps, layout))
    if layout.reuses_gradient_memory:
        reuse_gradient_memory(model)
    compiles = arguments.torch_compile or run.launch.torch_compile
    if compiles and run.launch.zero_stage == 3:
        # ZeRO-3's hooks around every module break the graph into hundreds of pieces, and torch recompiles
        # until it gives up.
        run.print("note           --torch_compile is ignored under ZeRO-3")
    elif compiles:
        compile_layers(model)


def _memory(task: Task, model: torch.nn.Module, steps: TrainSteps, layout: Layout) -> list[str]:
    try:
        return memory_lines(dry_run(model, task, steps.largest_micro_batch(), layout), layout)
    except Exception as error:  # for example, the forward pass reads values of tensors
        return [f"memory         no estimate: a dry run of the model fails ({type(error).__name__})"]


def train_steps(arguments: Any, data: Data, plan: Plan, rank: int) -> TrainSteps:
    """This process's training batches by optimizer step."""
    return TrainSteps(
        data.splits["train"], plan, rank, arguments.seed, arguments.length_grouping, data.padding_free
    )


def eval_rows(run: Run, arguments: Any, task: Task, split: Split) -> EvalRows:
    """The batches of an evaluation, longest rows first."""
    by_tokens = task.evaluates_by_tokens and run.device.type == "cpu"
    return EvalRows(split, *evaluation_batch(arguments, by_tokens, split.evaluation_rows))


def fit_options(arguments: Any, task: Task) -> FitOptions:
    """The arguments of `fit`."""
    return FitOptions(
        seed=arguments.seed,
        max_grad_norm=arguments.max_grad_norm,
        best_metric=task.best_metric,
        greater_is_better=higher_is_better(arguments, task.best_metric),
        early_stopping_patience=arguments.early_stopping_patience,
        save_total_limit=arguments.save_total_limit,
        dataloader_num_workers=arguments.dataloader_num_workers,
        profile=arguments.profile,
    )


def best_models(run: Run, arguments: Any, task: Task, model: Any) -> BestModels:
    return BestModels(
        run=run,
        folder=Path(arguments.output_dir),
        task=task,
        model=model,
        greater_is_better=higher_is_better(arguments, task.best_metric),
        keep_best=arguments.keep_best,
        num_averaged=arguments.average_checkpoints or 0,
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
    """Writes best/, its entries of metrics.json, and samples and images for TensorBoard. `keeps_predictions`:
    keeps `best`, the predictions of the validation rows, for the report. All processes must call it."""
    with Phase("exporting", shown=run.is_main):
        weights = checkpoint.full_weights(run, model)
        run.on_main(partial(_export, folder, task, run.unwrapped(model), weights, tracker, best))
        if keeps_predictions:
            run.on_main(lambda: None if best is None else final_report.save_best_predictions(folder, best))


def _export(
    folder: Path,
    task: Task,
    model: Any,
    weights: dict[str, torch.Tensor],
    tracker: Tracker,
    best: Predictions | None,
) -> None:
    merge_metrics(folder, task.export(folder / BEST, model, weights, best))
    for tag, markdown in (task.samples(best) if best is not None else {}).items():
        tracker.text(tag, markdown)
    for name, image in (task.overlays(best) if best is not None else {}).items():
        tracker.image(name, image)


def load_best(run: Run, arguments: Any, load: Callable[[Path], Any]) -> Any:
    """Calls `load` on best/ on every process. Machines without a shared disk receive a temporary copy."""
    folder = Path(arguments.output_dir) / BEST
    place = checkpoint.fetch(run, folder, arguments.shared_output_dir)
    try:
        return load(place)
    finally:
        checkpoint.discard(run, place, folder)


def finish_training(run: Run, training: Training, state: TrainState) -> dict[str, Any]:
    """Exports the last model if no evaluation chose one, and the averaged weights of --average_checkpoints.
    Returns best_* and the exported model's eval_* metrics."""
    if state.best_step is None:
        state.best_step = state.step
        run.on_main(partial(begin_best, training.output_dir, state.step))
        with averaged(training.average):
            training.export(None)
    of_average = {}
    if training.best_models.num_averaged:
        of_average = training.best_models.export_average(state, training.validation, training.export)
    training.tracker.close()
    run.wait()
    return run.on_main(partial(_best_metrics, training.output_dir, state)) | of_average


def _best_metrics(folder: Path, state: TrainState) -> dict[str, Any]:
    status.saved(state.step)
    events = [event for event in read_history(folder) if event["step"] == state.best_step]
    metrics = {key: value for event in events for key, value in event.items() if key.startswith("eval_")}
    return {"best_step": state.best_step, "best_metric": state.best_metric, **metrics}


def release(run: Run, training: Training) -> None:
    """Frees the training model's memory for the exported model."""
    training.steps.close()
    wrapped = training.model
    training.model = training.optimizer = training.export = training.best_models = training.average = None
    if run.deepspeed_config is not None:
        wrapped.destroy()
    del wrapped
    run.accelerator.free_memory()


def _forget_missing_best(run: Run, folder: Path, state: TrainState) -> None:
    """Resets the best model if its files are missing, as in a new output folder, damaged, or of a step after
    the checkpoint. Rank 0 checks: machines may not share the folder and must agree."""
    problem = (
        run.on_main(partial(_problem_of_best, folder, state.best_step))
        if state.best_step is not None
        else None
    )
    if problem is None:
        return
    run.print(
        f"note           the best model so far (step {state.best_step}) {problem}; later "
        "evaluations choose a new one"
    )
    state.best_metric, state.best_step, state.evaluations_without_best = None, None, 0


def _problem_of_best(folder: Path, best_step: int) -> str | None:
    if not (folder / BEST).is_dir():
        return f"is not in {folder}"
    exported = read_metrics(folder / METRICS).get("best_step")
    if exported not in (None, best_step):
        return f"was replaced by that of step {exported}"
    for file in (folder / BEST).glob("*.safetensors"):
        try:
            with safe_open(file, "pt"):  # checks the file size against its header
                pass
        except (OSError, SafetensorError):
            return f"is damaged: {file} cannot be read"
    return None


def _forget_other_losses(run: Run, task: Task, state: TrainState) -> None:
    """Forgets losses of another scale if --loss or its settings have changed since the checkpoint, and so the
    best models if the loss chooses them."""
    before, now = state.loss_settings, json.loads(as_json(task.loss_settings))
    if before in (None, now):
        return
    state.loss_settings, state.best_loss = now, None
    state.kept = [{**evaluation, "loss": None} for evaluation in state.kept]
    if task.best_metric == "loss" and state.best_step is not None:
        run.print(
            f"note           the best model so far (step {state.best_step}) has a loss of other settings, "
            "which cannot be compared; later evaluations choose a new one"
        )
        state.best_metric, state.best_step, state.kept, state.evaluations_without_best = None, None, [], 0


def _switch_best_metric(run: Run, folder: Path, metric: str, state: TrainState) -> None:
    """Adapts the best models to a changed --metric_for_best_model, with values from the history. If the best
    model has none, resets it."""
    if state.best_step is None or state.best_metric_name == metric:
        return
    steps = [state.best_step, *(evaluation["step"] for evaluation in state.kept)]
    value, *kept_values = run.on_main(
        lambda: [_metric_in_history(folder, f"eval_{metric}", step) for step in steps]
    )
    state.kept = [
        {**evaluation, "metric": kept_value}
        for evaluation, kept_value in zip(state.kept, kept_values, strict=True)
        if None not in (value, kept_value)
    ]
    chosen = f"the best model so far (step {state.best_step}) was chosen by {state.best_metric_name}"
    if value is None:
        run.print(
            f"note           {chosen} and has no {metric}; later evaluations choose a new one by {metric}"
        )
        state.best_step = None
    else:
        run.print(f"note           {chosen}; from now on {metric} decides (its value there: {value:.4f})")
    state.best_metric, state.best_metric_name, state.evaluations_without_best = value, metric, 0


def _metric_in_history(folder: Path, name: str, step: int) -> float | None:
    """The metric of the evaluation at this step; None if the history has none."""
    return next(
        (event[name] for event in read_history(folder) if event["step"] == step and name in event), None
    )
