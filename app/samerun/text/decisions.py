"""From a classifier's logits to its decisions: temperatures and thresholds, fixed or fitted on validation
rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samerun.data.files import read_object
from samerun.errors import InputError
from samerun.metrics.multilabel import (
    binary_cross_entropy,
    expected_calibration_error,
    per_label_table,
    sigmoid,
)
from samerun.metrics.thresholds import F1, FOLDS, Objective, decide, folds_of, tune_thresholds
from samerun.models.calibration import fit_temperatures
from samerun.task import Predictions, Split


class Fitted(NamedTuple):
    """Temperatures of the logits and thresholds of the calibrated probabilities, (labels,) each. `tuning`:
    how the thresholds were tuned, for the model's configuration; None for fixed thresholds."""

    temperatures: np.ndarray
    thresholds: np.ndarray
    tuning: dict[str, Any] | None = None

    @property
    def calibrates(self) -> bool:
        return bool((self.temperatures != 1).any())

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Calibrated probabilities of logits (rows, labels) or (labels,)."""
        return sigmoid(logits / self.temperatures)


@dataclass(frozen=True)
class Decider:
    """Fits temperatures and thresholds. `fixed`: (labels,) thresholds of --threshold; `calibration`: as
    --calibration; `seed`: of the folds; `tuned_on`: hash of the rows on which a trained model's thresholds
    were tuned."""

    fixed: np.ndarray | None = None
    objective: Objective = F1
    calibration: str = "none"
    seed: int = 0
    tuned_on: str | None = None

    def of_trained(self, config: Any) -> Decider:
        """The decider that tuned a trained model's thresholds, from its configuration; `self` for fixed
        thresholds."""
        tuning = getattr(config, "threshold_tuning", None)
        if tuning is None or self.fixed is not None:
            return self
        return replace(
            self, objective=Objective(**tuning["objective"]), seed=tuning["seed"], tuned_on=tuning["rows"]
        )

    def fit(self, logits: np.ndarray, labels: np.ndarray) -> Fitted:
        """Fits temperatures and thresholds on all rows; logits and labels: (rows, labels)."""
        temperatures = np.ones(logits.shape[1])
        if self.calibration != "none" and len(logits):
            temperatures = fit_temperatures(
                logits, labels, per_label=self.calibration == "temperature_per_label"
            )
        thresholds = self.fixed
        if thresholds is None:
            thresholds = tune_thresholds(sigmoid(logits / temperatures), labels, self.objective)
        return Fitted(temperatures, thresholds)

    def held_out(self, logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Calibrated logits and decisions by cross-validation, (rows, labels) each: each fold uses
        temperatures and thresholds fitted on the other folds. Metrics of the rows that the fit has seen would
        be too good."""
        if self.fixed is not None and self.calibration == "none":
            return logits, decide(sigmoid(logits), self.fixed)
        calibrated, decisions = np.array(logits, dtype=np.float64), np.zeros(logits.shape, dtype=bool)
        for fold in folds_of(len(logits), self.seed):
            fitted = self.fit(logits[~fold], labels[~fold])
            calibrated[fold] = logits[fold] / fitted.temperatures
            decisions[fold] = decide(fitted.probabilities(logits[fold]), fitted.thresholds)
        return calibrated, decisions

    def decisions(self, predictions: Predictions, thresholds: np.ndarray | None, split: Split) -> np.ndarray:
        """(rows, labels) bool decisions at a trained model's thresholds; held-out ones without thresholds and
        for the rows on which the thresholds were tuned. So evaluating an exported model repeats the metrics
        of its training."""
        if thresholds is None or (self.tuned_on is not None and self.tuned_on == split.content()):
            # Calibration does not change the decisions at tuned thresholds.
            decider = replace(self, calibration="none") if self.fixed is None else self
            return decider.held_out(predictions["logits"], predictions["labels"])[1]
        return decide(sigmoid(predictions["logits"]), thresholds)

    def plot_data(self, best: Predictions) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(held-out probabilities, labels, exported thresholds, held-out decisions)."""
        logits, labels = best["logits"], best["labels"]
        calibrated, decisions = self.held_out(logits, labels)
        return sigmoid(calibrated), labels, self.fit(logits, labels).thresholds, decisions

    def report(self, best: Predictions, names: Sequence[str], split: Split) -> tuple[Fitted, dict[str, Any]]:
        """(temperatures and thresholds to export, entries of metrics.json). The entries: the table of labels,
        with the exported thresholds and the scores of held-out decisions, and calibration errors."""
        logits, labels = best["logits"], best["labels"]
        fitted, (calibrated, decisions) = self.fit(logits, labels), self.held_out(logits, labels)
        if self.fixed is None:
            tuning = {"objective": asdict(self.objective), "seed": self.seed, "rows": split.content()}
            fitted = fitted._replace(tuning=tuning)
        metrics = {
            "eval_per_label": per_label_table(sigmoid(logits), labels, fitted.thresholds, names, decisions),
            "eval_ece": expected_calibration_error(sigmoid(logits), labels),
        }
        if self.fixed is None:
            metrics["eval_tuned_folds"] = min(FOLDS, len(logits))
        if self.calibration != "none":
            metrics["eval_calibrated_ece"] = expected_calibration_error(sigmoid(calibrated), labels)
            metrics["eval_binary_cross_entropy"] = binary_cross_entropy(logits, labels)
            metrics["eval_calibrated_binary_cross_entropy"] = binary_cross_entropy(calibrated, labels)
        return fitted, metrics


def make_decider(arguments: Any, labels: Sequence[str]) -> Decider:
    """The decider of `DecisionArguments`. Raises `InputError` for thresholds of unknown labels and for
    missing ones."""
    a = arguments
    name, number = a.threshold_objective
    objective = Objective(name, miss_cost=number or 1.0) if name == "cost" else Objective(name, number or 0.0)
    return Decider(fixed_thresholds(a.fixed_thresholds, labels), objective, a.calibration, a.seed)


def fixed_thresholds(parts: Sequence[str] | None, labels: Sequence[str]) -> np.ndarray | None:
    """(labels,) the thresholds of --threshold; None without the argument. Each part is a number for all
    labels, LABEL=NUMBER, or a json file {"LABEL": NUMBER}; later parts win. Raises `InputError`."""
    if parts is None:
        return None
    thresholds, problems = {}, []
    for part in parts:
        name, _, number = part.rpartition("=")
        if _as_number(part) is not None:
            values = dict.fromkeys(labels, part)
        elif name and _as_number(number) is not None:
            values = {name: number}
        elif Path(part).suffix == ".json" or Path(part).is_file():
            values = _read_file(part)
        else:
            problems.append(
                f"--threshold {part}: expected a number, LABEL=NUMBER, or a json file of labels and numbers"
            )
            continue
        for label, value in values.items():
            threshold = _as_number(value)
            if label not in labels:
                problems.append(
                    f"--threshold {part}: the model has no label {label!r}; it has {', '.join(labels[:20])}"
                )
            elif threshold is None or not 0 <= threshold <= 1:
                problems.append(f"--threshold {part}: {value!r} for {label!r}, expected a number from 0 to 1")
            else:
                thresholds[label] = threshold
    missing = [label for label in labels if label not in thresholds]
    if missing and not problems:
        examples = ", ".join(missing[:20])
        problems.append(
            f"--threshold lacks {len(missing)} label(s): {examples}; put a number for all other labels first"
        )
    if problems:
        raise InputError(*problems)
    return np.array([thresholds[label] for label in labels])


def _read_file(path: str) -> dict[str, Any]:
    try:
        return read_object(path)
    except InputError as error:
        raise InputError(*(f"--threshold {problem}" for problem in error.problems)) from None


def _as_number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
