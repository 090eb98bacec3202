"""The models of a run's best evaluations: best/, and with --keep_best those in best_models/step_N.

`TrainState.kept` lists these evaluations, best first. `samerun.training` chooses and exports; this module
ranks, removes, and looks after a resume what is still there.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from samerun import checkpoint
from samerun.checkpoint import TrainState
from samerun.files import as_json, remove_folder
from samerun.reports.tracker import read_history
from samerun.run_folder import BEST, BEST_MODELS, METRICS, read_metrics
from samerun.task import Task


def ranked(evaluations: list[dict[str, Any]], greater_is_better: bool) -> list[dict[str, Any]]:
    """Sorts evaluations, best first: by metric, then loss, then step."""
    sign = -1 if greater_is_better else 1
    return sorted(
        evaluations,
        key=lambda e: (sign * e["metric"], math.inf if e["loss"] is None else e["loss"], e["step"]),
    )


def remove_others(folder: Path, kept: list[dict[str, Any]]) -> None:
    """Removes the models of all other evaluations from best_models/ in the run's `folder`."""
    steps = [evaluation["step"] for evaluation in kept]
    for path in checkpoint.list_checkpoints(folder / BEST_MODELS):
        if checkpoint.step_of(path) not in steps:
            remove_folder(path)


def recover(
    folder: Path, state: TrainState, task: Task, keep_best: int, complete: bool
) -> tuple[TrainState, list[str]]:
    """(a checkpoint's state, adapted to the models that `folder` holds and, unless the run is `complete`, to
    a changed --metric_for_best_model or loss; notes). Rank 0 only: machines may not share the folder."""
    notes, best_step = [], state.best_step
    problem = None if best_step is None else _problem_of_best(folder, best_step)
    if problem is not None:
        what_now = "the last model is exported" if complete else "later evaluations choose a new one"
        notes.append(f"the best model so far (step {best_step}) {problem}; {what_now}")
        state.best_metric, state.best_step, state.evaluations_without_best = None, None, 0
    if not complete:
        if state.best_metric_name != task.best_metric and state.best_step is None:
            state.kept = []  # by the other metric
        elif state.best_metric_name != task.best_metric:
            notes.append(_switch_metric(folder, state, task.best_metric))
        notes += _forget_other_losses(state, task)
    present = [
        e for e in state.kept if keep_best > 1 and (folder / BEST_MODELS / f"step_{e['step']}").exists()
    ]
    if missing := [str(e["step"]) for e in state.kept if keep_best > 1 and e not in present]:
        notes.append(f"the kept models of step {', '.join(missing)} are missing in {folder}: ignored")
    state.kept = present
    return state, notes


def _problem_of_best(folder: Path, best_step: int) -> str | None:
    """Why best/ is not the model of `best_step`, undamaged; None if it is."""
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


def _switch_metric(folder: Path, state: TrainState, metric: str) -> str:
    """Compares by another metric from now on, with values from the history. Returns a note. If the best model
    has no value, a new one will be chosen."""
    values = {
        event["step"]: event[f"eval_{metric}"] for event in read_history(folder) if f"eval_{metric}" in event
    }
    value = values.get(state.best_step)
    state.kept = [
        {**evaluation, "metric": values[evaluation["step"]]}
        for evaluation in state.kept
        if value is not None and values.get(evaluation["step"]) is not None
    ]
    chosen = f"the best model so far (step {state.best_step}) was chosen by {state.best_metric_name}"
    state.best_metric, state.best_metric_name, state.evaluations_without_best = value, metric, 0
    if value is not None:
        return f"{chosen}; from now on {metric} decides (its value there: {value:.4f})"
    state.best_step = None
    return f"{chosen} and has no {metric}; later evaluations choose a new one by {metric}"


def _forget_other_losses(state: TrainState, task: Task) -> list[str]:
    """Forgets losses of another scale if --loss or its settings have changed since the checkpoint, and so the
    best models if the loss chooses them. Returns notes."""
    before, now = state.loss_settings, json.loads(as_json(task.loss_settings))
    if before in (None, now):
        return []
    state.loss_settings, state.best_loss = now, None
    if task.best_metric != "loss":
        state.kept = [{**evaluation, "loss": None} for evaluation in state.kept]
        return []
    step = state.best_step
    state.best_metric, state.best_step, state.kept, state.evaluations_without_best = None, None, [], 0
    if step is None:
        return []
    return [
        f"the best model so far (step {step}) has a loss of other settings, which cannot be compared; later "
        "evaluations choose a new one"
    ]
