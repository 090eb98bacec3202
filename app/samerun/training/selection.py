"""Choice of the best model, and early stopping."""

from __future__ import annotations

from functools import partial

from samerun.checkpoint import TrainState
from samerun.errors import InputError
from samerun.output.run_folder import begin_best
from samerun.runtime import Run
from samerun.training.evaluation import evaluate
from samerun.training.training import FitOptions, Training


def evaluate_and_keep_best(run: Run, training: Training, state: TrainState) -> bool:
    """Evaluates the model and exports it if it is the best so far. Returns whether training stops early."""
    task, options = training.task, training.options
    metrics, predictions = evaluate(run, training.model, task, training.validation, stoppable=True)
    training.tracker.log(
        {
            "step": state.step,
            "epoch": round(state.step / training.plan.steps_per_epoch, 6),
            **{f"eval_{name}": value for name, value in metrics.items()},
        },
        shown=tuple(f"eval_{name}" for name in task.shown_metrics),
    )
    if options.best_metric not in metrics:  # one of --metrics, whose names were not known before
        raise InputError(
            f"--metric_for_best_model {options.best_metric}: neither the task nor --metrics has such a "
            f"metric; this evaluation has {', '.join(metrics)}"
        )
    value, loss = metrics[options.best_metric], metrics.get("loss")
    if value is not None and _is_better(value, loss, state, options.greater_is_better):
        state.best_metric, state.best_metric_name, state.best_loss = value, options.best_metric, loss
        state.best_step, state.evaluations_without_best = state.step, 0
        run.on_main(partial(begin_best, training.output_dir, state.step))
        training.export(predictions)
    else:
        state.evaluations_without_best += 1
    if value is not None and training.best_models is not None:
        training.best_models.add(state, value, loss, predictions)
    if not out_of_patience(options, state):
        return False
    evaluations = state.evaluations_without_best
    training.tracker.say(f"stopping early: no better {options.best_metric} in {evaluations} evaluations")
    return True


def out_of_patience(options: FitOptions, state: TrainState) -> bool:
    patience = options.early_stopping_patience
    return patience is not None and state.evaluations_without_best >= patience


def _is_better(metric: float, loss: float | None, state: TrainState, greater_is_better: bool) -> bool:
    """Whether a model is better than the best so far. The loss breaks ties: the F1 of rare labels may stay 0
    for epochs while the model learns."""
    best = state.best_metric
    if metric == best:
        return loss is not None and state.best_loss is not None and loss < state.best_loss
    return best is None or (metric > best if greater_is_better else metric < best)
