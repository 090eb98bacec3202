"""Compares two runs of the same job by their files."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from samerun.files import read_lines
from samerun.tools.moving.observer import read_steps

TOLERANCE = 1e-5  # of weights, losses and gradient norms, relative: fp32 rounding of sums in another order
METRICS_TOLERANCE = 1e-6  # of evaluation metrics, absolute
PREDICTIONS_TOLERANCE = 1e-4  # of logits and other predictions of the validation rows, absolute
# An element whose gradient cancels exactly has only rounding left of it: attention's key biases, because a
# softmax ignores a constant, and biases before a norm. Adam divides a gradient by its own size and so turns
# rounding into whole learning rates in random directions. Such an element is left out: its gradient, the root
# of Adam's second moment, is below this share of the model's largest one, about fp32's precision. (Measured:
# at most 6e-8 for biases before norms, 3e-12 for key biases.) One without any gradient is compared.
GRADIENT_ROUNDING = 1e-7
SECOND_MOMENTS = "exp_avg_sq/"  # prefix of Adam's second moments in a checkpoint


@dataclass(frozen=True)
class Outcome:
    """The compared results of a run; the dictionaries' keys are steps from 1. `gradients`: tensor ->
    sizes of its elements' gradients, a running mean over the steps, up to a factor common to all; empty
    without Adam's second moments. `predictions`: floating-point predictions of the validation rows, such
    as logits, by step and name; `random_calls`: lines of code that draw random numbers not by row."""

    weights: dict[str, Any]
    steps: dict[int, dict[str, Any]]
    evaluations: dict[int, dict[str, Any]]
    rows: dict[int, list[int]]
    learning_rates: dict[int, list[float]]
    gradients: dict[str, Any] = field(default_factory=dict)
    predictions: dict[int, dict[str, Any]] = field(default_factory=dict)
    random_calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """The largest differences between two runs; infinite for values that only one run has."""

    weights: float  # relative, see `weight_differences`; without elements of rounding alone
    where: str  # the tensor
    losses: float  # relative
    grad_norms: float  # relative
    metrics: float  # absolute
    same_learning_rates: bool  # exactly
    same_rows: bool  # of each step, exactly
    eval_losses: float = 0.0  # absolute; also one of `metrics`
    predictions: float = 0.0  # absolute
    left_out: float = 0.0  # share of the elements whose gradient is rounding alone

    def is_rounding(self, weights: float = TOLERANCE, metrics: float = METRICS_TOLERANCE) -> bool:
        """Whether all differences are fp32 rounding; `weights`, `metrics`: how far these may differ."""
        return (
            self.weights <= weights
            and max(self.losses, self.grad_norms) <= TOLERANCE
            and self.metrics <= metrics
            and self.eval_losses <= METRICS_TOLERANCE
            and self.predictions <= PREDICTIONS_TOLERANCE
            and self.same_learning_rates
            and self.same_rows
        )


def read_outcome(folder: Path, observed: Path) -> Outcome:
    """Reads a run's folder, its last checkpoint, and its steps that `observer` recorded in the folder
    `observed`.

    Raises `ValueError` or `OSError` if one of them is missing or damaged."""
    from safetensors.torch import load_file

    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    events = list(read_lines(folder / "history.jsonl"))
    checkpoint = folder / "checkpoints" / f"step_{run['plan']['total_steps']}"
    steps = read_steps(observed, folder.name, run["world_size"])
    arrays, random = observed.glob(f"{folder.name}.predictions_*.npz"), observed / f"{folder.name}.random.txt"
    return Outcome(
        weights=load_file(checkpoint / "model.safetensors"),
        gradients=read_gradients(checkpoint),
        steps={event["step"]: event for event in events if "loss" in event},
        evaluations={event["step"]: event for event in events if "eval_loss" in event},
        rows={step + 1: line["rows"] for step, line in steps.items()},
        learning_rates={step + 1: line["learning_rates"] for step, line in steps.items()},
        predictions={int(path.stem.rpartition("_")[2]): dict(np.load(path)) for path in arrays},
        random_calls=tuple(random.read_text(encoding="utf-8").splitlines() if random.exists() else ()),
    )


def compare(ours: Outcome, theirs: Outcome) -> Difference:
    """The differences of `ours` from `theirs`, over the steps of `ours`, which may be a resumed run."""
    steps = {step: event for step, event in theirs.steps.items() if step >= min(ours.steps)}
    evaluations = {step: metrics for step, metrics in theirs.evaluations.items() if step in steps}
    predictions = {step: arrays for step, arrays in theirs.predictions.items() if step in evaluations}
    rounding = rounding_alone(theirs.gradients)
    weights = weight_differences(ours.weights, theirs.weights, rounding)
    where = max(weights, key=lambda name: (math.isnan(weights[name]), weights[name]))
    return Difference(
        left_out=sum(int(mask.sum()) for mask in rounding.values())
        / sum(tensor.numel() for tensor in theirs.weights.values()),
        weights=weights[where],
        where=where,
        losses=_worst(lambda our, their: relative(our.get("loss"), their["loss"]), ours.steps, steps),
        grad_norms=_worst(
            lambda our, their: relative(our.get("grad_norm"), their["grad_norm"]), ours.steps, steps
        ),
        metrics=_worst(_metrics_difference, ours.evaluations, evaluations),
        eval_losses=_worst(partial(_metrics_difference, only=("eval_loss",)), ours.evaluations, evaluations),
        predictions=_worst(_predictions_difference, ours.predictions, predictions),
        same_learning_rates=ours.learning_rates == {step: theirs.learning_rates[step] for step in steps},
        same_rows=ours.rows == {step: theirs.rows[step] for step in steps},
    )


def weight_differences(
    ours: dict[str, Any], theirs: dict[str, Any], rounding: dict[str, Any]
) -> dict[str, float]:
    """Tensor -> its largest difference, relative to its largest element or, if that is larger, to that of a
    typical tensor: the median, tensors counted by their elements; without the elements of `rounding` (see
    `rounding_alone`).

    A bias that started at zero is only a few updates large, and where the gradients of two steps nearly
    cancel, Adam turns their rounding into a share of an update.
    """
    if ours.keys() != theirs.keys():
        return {f"{sorted(ours.keys() ^ theirs.keys())[0]} (only one run has it)": math.inf}
    weights = {name: each for name, each in theirs.items() if each.is_floating_point() and each.numel()}
    sizes = sorted((float(each.abs().max()), each.numel()) for each in weights.values())
    counts = np.cumsum([count for _, count in sizes])
    typical = sizes[int(np.searchsorted(counts, counts[-1] / 2))][0]
    differences = {}
    for name, tensor in weights.items():
        moved = (ours[name] - tensor).abs()
        if name in rounding:
            moved = moved.masked_fill(rounding[name], 0)
        difference, size = float(moved.max()), max(float(tensor.abs().max()), typical)
        differences[name] = difference / size if size else (math.inf if difference else 0.0)
    return differences


def rounding_alone(gradients: dict[str, Any]) -> dict[str, Any]:
    """Tensor -> bool for each element: whether its gradient is rounding alone. `gradients`: see `Outcome`."""
    largest = max((float(sizes.max()) for sizes in gradients.values()), default=0.0)
    return {name: (sizes > 0) & (sizes <= GRADIENT_ROUNDING * largest) for name, sizes in gradients.items()}


def read_gradients(checkpoint: Path) -> dict[str, Any]:
    """`Outcome.gradients`: the square roots of Adam's second moments, which are running means of squared
    gradients."""
    from safetensors import safe_open

    path = checkpoint / "optimizer.safetensors"
    if not path.is_file():
        return {}
    with safe_open(path, "pt") as stored:
        names = [name for name in stored.keys() if name.startswith(SECOND_MOMENTS)]  # noqa: SIM118 - no mapping
        moments = {name.removeprefix(SECOND_MOMENTS): stored.get_tensor(name) for name in names}
    return {name: moment.sqrt() for name, moment in moments.items() if moment.numel()}


def _worst(
    difference: Callable[[dict, dict], float], ours: dict[int, dict], theirs: dict[int, dict]
) -> float:
    """The largest difference of a step."""
    return _largest(difference(ours.get(step, {}), values) for step, values in theirs.items())


def _metrics_difference(ours: dict[str, Any], theirs: dict[str, Any], only: tuple[str, ...] = ()) -> float:
    if ours.keys() != theirs.keys():
        return math.inf
    pairs = ((ours[name], theirs[name]) for name in only or theirs)
    return _largest(
        (0.0 if our == their else math.inf) if None in (our, their) else abs(our - their)
        for our, their in pairs
    )


def _predictions_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    if {name: array.shape for name, array in ours.items()} != {n: array.shape for n, array in theirs.items()}:
        return math.inf
    changed = {name: ours[name] != array for name, array in theirs.items()}  # both may be infinite
    return _largest(
        float(abs(ours[name][where] - theirs[name][where]).max(initial=0.0))
        for name, where in changed.items()
    )


def relative(ours: float | None, theirs: float | None) -> float:
    """The relative difference of two numbers; infinite if one is unknown, and from 0."""
    if ours is None or not theirs:
        return 0.0 if ours == theirs else math.inf
    return abs(ours - theirs) / abs(theirs)


def _largest(differences: Any) -> float:
    """The largest difference; NaN counts as infinite."""
    return max((math.inf if math.isnan(number) else number for number in differences), default=0.0)


def read_activations(folder: Path, name: str) -> dict[str, dict[str, float]]:
    """The records of all processes of a run."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob(f"{name}.activations.rank_*.json")):
        for module, rows in json.loads(path.read_text(encoding="utf-8")).items():
            found.setdefault(module, {}).update(rows)
    return found


def first_difference(
    ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]], tolerance: float
) -> tuple[str, str, float] | None:
    """(module, row, difference relative to the larger norm) of the first module, in the order of `theirs`,
    some of whose rows differ by more than `tolerance`; of the row that differs most. None without one."""
    for module, rows in theirs.items():
        own = ours.get(module, {})
        differences = {row: _relative(own[row], norm) for row, norm in rows.items() if row in own}
        worst = max(differences, key=differences.get, default=None)
        if worst is not None and differences[worst] > tolerance:
            return module, worst, differences[worst]
    return None


def _relative(ours: float, theirs: float) -> float:
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return 0.0 if str(ours) == str(theirs) else math.inf
    return abs(ours - theirs) / max(abs(ours), abs(theirs), 1e-30)
