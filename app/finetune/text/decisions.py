"""From a classifier's logits to its decisions: temperatures and thresholds, given by hand or chosen on validation rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finetune.errors import InputError
from finetune.metrics.multilabel import binary_cross_entropy, expected_calibration_error, per_label_table, sigmoid
from finetune.metrics.thresholds import F1, FOLDS, Objective, decide, folds_of, tune_thresholds
from finetune.models.calibration import fit_temperatures
from finetune.reading.json_files import read_object
from finetune.task import Predictions, Split


class Fitted(NamedTuple):
    """(labels,) each: what logits are divided by, and the thresholds of the probabilities that they then give. `tuning`: how
    the thresholds were chosen, for the model's configuration; None if they were given."""

    temperatures: np.ndarray
    thresholds: np.ndarray
    tuning: dict[str, Any] | None = None

    @property
    def calibrates(self) -> bool:
        return bool((self.temperatures != 1).any())

    def chances(self, logits: np.ndarray) -> np.ndarray:
        """Probabilities, (rows, labels) or of one row (labels,)."""
        return sigmoid(logits / self.temperatures)


@dataclass(frozen=True)
class Decider:
    """How temperatures and thresholds are chosen. `given`: (labels,) thresholds by hand; `calibration`: as --calibration;
    `seed`: draws the folds; `tuned_on`: hash of the rows that chose a trained model's thresholds."""

    given: np.ndarray | None = None
    objective: Objective = F1
    calibration: str = "none"
    seed: int = 0
    tuned_on: str | None = None

    def of_trained(self, config: Any) -> Decider:
        """The one that chose the thresholds of a trained model, which its configuration names; this one where none did."""
        tuning = getattr(config, "threshold_tuning", None)
        if tuning is None or self.given is not None:
            return self
        return replace(self, objective=Objective(**tuning["objective"]), seed=tuning["seed"], tuned_on=tuning["rows"])

    def fit(self, logits: np.ndarray, labels: np.ndarray) -> Fitted:
        """What an exported model gets: chosen on all these rows, (rows, labels)."""
        temperatures = np.ones(logits.shape[1])
        if self.calibration != "none" and len(logits):
            temperatures = fit_temperatures(logits, labels, per_label=self.calibration == "temperature_per_label")
        thresholds = self.given
        if thresholds is None:
            thresholds = tune_thresholds(sigmoid(logits / temperatures), labels, self.objective)
        return Fitted(temperatures, thresholds)

    def held_out(self, logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(logits divided by temperatures, decisions), (rows, labels) each: those of a row by what the rows of other folds
        chose. Metrics of them are not biased as those are on the very rows that chose."""
        if self.given is not None and self.calibration == "none":
            return logits, decide(sigmoid(logits), self.given)
        calibrated, decided = np.array(logits, dtype=np.float64), np.zeros(logits.shape, dtype=bool)
        for fold in folds_of(len(logits), self.seed):
            fitted = self.fit(logits[~fold], labels[~fold])
            calibrated[fold] = logits[fold] / fitted.temperatures
            decided[fold] = decide(fitted.chances(logits[fold]), fitted.thresholds)
        return calibrated, decided

    def decisions(self, predictions: Predictions, thresholds: np.ndarray | None, split: Split) -> np.ndarray:
        """(rows, labels) bool: at a trained model's thresholds; without any, and for the very rows that chose them, held out.
        So an exported model has the metrics that its training reported."""
        if thresholds is None or (self.tuned_on is not None and self.tuned_on == split.content()):
            # Thresholds that are tuned decide the same whatever a label's logits are divided by.
            decider = replace(self, calibration="none") if self.given is None else self
            return decider.held_out(predictions["logits"], predictions["labels"])[1]
        return decide(sigmoid(predictions["logits"]), thresholds)

    def judged(self, best: Predictions) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(held-out probabilities; labels; the exported thresholds; held-out decisions) for figures."""
        logits, labels = best["logits"], best["labels"]
        calibrated, decided = self.held_out(logits, labels)
        return sigmoid(calibrated), labels, self.fit(logits, labels).thresholds, decided

    def report(self, best: Predictions, names: Sequence[str], split: Split) -> tuple[Fitted, dict[str, Any]]:
        """(what the exported model gets; what it adds to metrics.json: the table of labels, with the exported thresholds and
        scores of held-out decisions, and how well probabilities are calibrated, before and after)."""
        logits, labels = best["logits"], best["labels"]
        fitted, (calibrated, decided) = self.fit(logits, labels), self.held_out(logits, labels)
        if self.given is None:
            tuning = {"objective": asdict(self.objective), "seed": self.seed, "rows": split.content()}
            fitted = fitted._replace(tuning=tuning)
        metrics = {
            "eval_per_label": per_label_table(sigmoid(logits), labels, fitted.thresholds, names, decided),
            "eval_ece": expected_calibration_error(sigmoid(logits), labels),
        }
        if self.given is None:
            metrics["eval_tuned_folds"] = min(FOLDS, len(logits))
        if self.calibration != "none":
            metrics["eval_calibrated_ece"] = expected_calibration_error(sigmoid(calibrated), labels)
            metrics["eval_binary_cross_entropy"] = binary_cross_entropy(logits, labels)
            metrics["eval_calibrated_binary_cross_entropy"] = binary_cross_entropy(calibrated, labels)
        return fitted, metrics


def decider_of(arguments: Any, labels: Sequence[str]) -> Decider:
    """As the arguments ask. Raises `InputError` for thresholds of unknown labels, and for missing ones."""
    a = arguments
    objective = Objective(a.threshold_objective, a.threshold_target or 0.0, a.miss_cost)
    return Decider(given_thresholds(a.threshold, labels), objective, a.calibration, a.seed)


def given_thresholds(parts: Sequence[str] | None, labels: Sequence[str]) -> np.ndarray | None:
    """(labels,) the thresholds of --threshold, whose parts are a number for all labels, LABEL=NUMBER, or json files
    {"LABEL": NUMBER}; later parts win. None without any. Raises `InputError`."""
    if parts is None:
        return None
    found, problems = {}, []
    for part in parts:
        name, _, number = part.rpartition("=")
        if _number(part) is not None:
            given = dict.fromkeys(labels, part)
        elif name and _number(number) is not None:
            given = {name: number}
        elif Path(part).suffix == ".json" or Path(part).is_file():
            given = _read(part)
        else:
            problems.append(f"--threshold {part}: expected a number, LABEL=NUMBER, or a json file of labels and numbers")
            continue
        for label, value in given.items():
            chance = _number(value)
            if label not in labels:
                problems.append(f"--threshold {part}: the model has no label {label!r}; it has {', '.join(labels[:20])}")
            elif chance is None or not 0 <= chance <= 1:
                problems.append(f"--threshold {part}: {value!r} for {label!r}, expected a number from 0 to 1")
            else:
                found[label] = chance
    missing = [label for label in labels if label not in found]
    if missing and not problems:
        shown = ", ".join(missing[:20])
        problems.append(f"--threshold gives none for {len(missing)} label(s): {shown}; put a number for all others first")
    if problems:
        raise InputError(*problems)
    return np.array([found[label] for label in labels])


def _read(path: str) -> dict[str, Any]:
    try:
        return read_object(path)
    except InputError as error:
        raise InputError(*(f"--threshold {problem}" for problem in error.problems)) from None


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
