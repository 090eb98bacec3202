"""What a run left, and how far that is from what another run of the same job left."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moving.observer import read_steps

WITHIN = 1e-5  # of weights, losses and gradient norms, relative: what fp32 rounding makes of another order of sums
METRICS_WITHIN = 1e-6  # of evaluation metrics, absolute
# Adding a constant to all scores of a softmax changes nothing, so a key's bias has a true gradient of zero. Adam divides what
# round-off makes of it by its own size, and moves the bias by whole learning rates in directions of no meaning.
WITHOUT_GRADIENT = re.compile(r"(^|\.)(key|k_proj|key_proj|k_lin)\.bias$")


@dataclass(frozen=True)
class Outcome:
    """What is compared of a run. `steps` and `observed` are by step, from 1; `evaluations` too."""

    weights: dict[str, Any]
    steps: dict[int, dict[str, Any]]
    evaluations: dict[int, dict[str, Any]]
    rows: dict[int, list[int]]
    learning_rates: dict[int, list[float]]


@dataclass(frozen=True)
class Difference:
    """The largest differences between two runs; infinite where one has what the other lacks."""

    weights: float  # of a tensor's elements, relative to its largest
    where: str  # the tensor
    losses: float  # relative
    grad_norms: float  # relative
    metrics: float  # absolute
    same_learning_rates: bool  # exactly
    same_rows: bool  # of each step, exactly

    @property
    def is_rounding(self) -> bool:
        """Whether nothing but the rounding of fp32 stands between the two."""
        near = max(self.weights, self.losses, self.grad_norms) <= WITHIN and self.metrics <= METRICS_WITHIN
        return near and self.same_learning_rates and self.same_rows


def read_outcome(folder: Path, observed: Path) -> Outcome:
    """Reads a run's folder, the last checkpoint in it, and what `observer` wrote of it into `observed`.

    Raises `ValueError` or `OSError` for a run that did not leave these."""
    from safetensors.torch import load_file

    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    events = [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    last = run["plan"]["total_steps"]
    steps = read_steps(observed, folder.name, run["world_size"])
    return Outcome(
        weights=load_file(folder / "checkpoints" / f"step_{last}" / "model.safetensors"),
        steps={event["step"]: event for event in events if "loss" in event},
        evaluations={event["step"]: event for event in events if "eval_loss" in event},
        rows={step + 1: line["rows"] for step, line in steps.items()},
        learning_rates={step + 1: line["learning_rates"] for step, line in steps.items()},
    )


def compare(ours: Outcome, theirs: Outcome) -> Difference:
    """How far `ours` is from `theirs`. Of a run that went on from a checkpoint its own steps are compared."""
    steps = [step for step in theirs.steps if step >= min(ours.steps)]
    evaluations = {step: metrics for step, metrics in theirs.evaluations.items() if step in steps}
    weights = weight_differences(ours.weights, theirs.weights)
    where = max(weights, key=weights.get)
    return Difference(
        weights=weights[where],
        where=where,
        losses=_largest(_relative(ours.steps.get(step, {}).get("loss"), theirs.steps[step]["loss"]) for step in steps),
        grad_norms=_largest(
            _relative(ours.steps.get(step, {}).get("grad_norm"), theirs.steps[step]["grad_norm"]) for step in steps
        ),
        metrics=_largest(_metrics_apart(ours.evaluations.get(step, {}), metrics) for step, metrics in evaluations.items()),
        same_learning_rates=ours.learning_rates == {step: theirs.learning_rates[step] for step in steps},
        same_rows=ours.rows == {step: theirs.rows[step] for step in steps},
    )


def weight_differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Tensor -> its largest difference relative to its largest element; those without a gradient are left out."""
    if ours.keys() != theirs.keys():
        return {f"{sorted(ours.keys() ^ theirs.keys())[0]} (only one run has it)": math.inf}
    found = {}
    for name, tensor in theirs.items():
        if not WITHOUT_GRADIENT.search(name) and tensor.is_floating_point() and tensor.numel():
            apart, size = float((ours[name] - tensor).abs().max()), float(tensor.abs().max())
            found[name] = apart / size if size else (math.inf if apart else 0.0)
    return found


def _metrics_apart(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    if ours.keys() != theirs.keys():
        return math.inf
    return _largest(
        (0.0 if our == their else math.inf) if None in (our, their) else abs(our - their)
        for our, their in ((ours[name], theirs[name]) for name in theirs)
    )


def _relative(ours: float | None, theirs: float | None) -> float:
    if None in (ours, theirs):
        return 0.0 if ours == theirs else math.inf
    return abs(ours - theirs) / abs(theirs) if theirs else (0.0 if ours == 0 else math.inf)


def _largest(differences: Any) -> float:
    """The largest of some differences, infinite if one is no number."""
    return max((math.inf if math.isnan(number) else number for number in differences), default=0.0)
