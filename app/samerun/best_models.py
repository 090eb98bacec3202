"""The models of a run's best evaluations: best/, and with --keep_best those in best_models/step_N.

`TrainState.kept` lists these evaluations, best first. `samerun.training` chooses and exports; this module
ranks, removes, and looks after a resume what is still there.
"""

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from samerun import checkpoint
from samerun.checkpoint import TrainState
from samerun.files import as_json, remove_folder
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
    """(a checkpoint's state, adapted to the models that `folder` holds; notes). Rank 0 only: machines may not
    share the folder. With another --metric_for_best_model or loss the ranking begins anew, unless the run is
    `complete`: values of two metrics, or of losses of two scales, are never compared."""
    notes, changed, losses = [], None, json.loads(as_json(task.loss_settings))
    if not complete and state.best_metric_name not in (None, task.best_metric):
        changed = f"was chosen by {state.best_metric_name}, not by {task.best_metric}"
    elif not complete and state.loss_settings not in (None, losses):
        changed = "has a loss of other settings, which cannot be compared"
    if changed is not None:
        state.kept, state.loss_settings = [], losses
    problem = changed or (None if state.best_step is None else _problem_of_best(folder, state.best_step))
    if problem is not None:
        if state.best_step is not None:
            what_now = "the last model is exported" if complete else "later evaluations choose a new one"
            notes.append(f"the best model so far (step {state.best_step}) {problem}; {what_now}")
        state.best_metric, state.best_loss, state.best_step = None, None, None
        state.evaluations_without_best = 0
    steps = [e["step"] for e in state.kept if keep_best > 1]
    missing = [step for step in steps if not (folder / BEST_MODELS / f"step_{step}").exists()]
    if missing:
        names = ", ".join(map(str, missing))
        notes.append(f"the kept models of step {names} are missing in {folder}: ignored")
    state.kept = [e for e in state.kept if e["step"] in steps and e["step"] not in missing]
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
