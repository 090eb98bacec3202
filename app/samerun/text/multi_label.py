"""Multi-label classification: a text has any number of labels. Binary cross-entropy, a threshold per label.

Scores, thresholds and figures are in `multi_label_scores`, losses in `losses`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samerun.data.files import read_object
from samerun.data.tables import Table
from samerun.data.tokens import Ragged
from samerun.errors import InputError, raise_problems
from samerun.models.pretrained import labels_of, own_labels
from samerun.plan import ENOUGH_UPDATES
from samerun.predictions import Likeliest, by_name
from samerun.reports.card import section
from samerun.run_folder import read_metrics
from samerun.task import Predictions, ReportContent
from samerun.text.labels import (
    Labelled,
    as_number,
    choose_labels,
    in_order_of_head,
    label_ids,
    label_source,
    note_counts,
    read_labels,
)
from samerun.text.losses import MultiLabelLoss, loss_of_arguments, loss_of_config
from samerun.text.multi_label_scores import (
    METRICS,
    Objective,
    Thresholds,
    ThresholdTuner,
    multilabel_scores,
    report_content,
    sigmoid,
)
from samerun.text.problem import Problem
from samerun.text.text import TextSplit

# For each label of the training rows (benchmarks/quality.md, "More updates for many labels").
UPDATES_PER_LABEL, MOST_UPDATES = 15, 1500
ALL_PREDICTED, MAX_PREDICTED = 1000, 10  # labels of a prediction: all of up to 1000, else at least ten
CARD_NOTE = (
    "\n`tuned_*` use the model's thresholds, one per label. On validation rows, which tuned them, each row "
    "is decided by thresholds tuned on the other folds; ECE is the expected calibration error over all "
    "labels.\n"
)
USAGE = """from transformers import pipeline
classify = pipeline("text-classification", model="best", top_k=None)
# A probability for every label; thresholds: classify.model.config.thresholds
classify("a text", truncation=True)"""


class MultiLabel(Problem):
    """A row has one target, 0 or 1, per label. Targets of files are `Labelled`."""

    name, title, usage = "multi_label", "Multi-label text classification", USAGE
    # Needs no threshold: F1 may stay 0 for epochs. A mean over labels is noise where many labels have few
    # validation rows (benchmarks/quality.md, "What chooses the best model").
    default_metric = "average_precision_micro"
    shown_metrics = (
        *("loss", "f1_micro", "f1_macro", "tuned_f1_micro", "tuned_f1_macro"),
        *("average_precision_micro", "average_precision_macro"),
    )
    metric_names, card_metrics = METRICS, (*METRICS, "ece", "calibrated_ece")

    def __init__(self, arguments: Any) -> None:
        super().__init__(arguments)
        self.loss = MultiLabelLoss(label_smoothing=arguments.label_smoothing_factor)
        self.tuner = ThresholdTuner()
        self.thresholds: np.ndarray | None = None  # of the exported model; in training: None
        self.fitted: Thresholds | None = None  # on the best model's validation rows

    # Targets

    def read(self, table: Table) -> Labelled | None:
        return read_labels(table, self.arguments, self.notes)

    def choose(self, config: Any, train: Labelled | None) -> None:
        a, self.labels = self.arguments, labels_of(config)
        if train is not None:
            names = in_order_of_head(a, config, train.names, self.notes)
            self.labels = choose_labels(a, own_labels(config), names, self.notes)
        fixed = fixed_thresholds(a.fixed_thresholds, self.labels)
        self.tuner = ThresholdTuner(fixed, Objective(**a.threshold_objective), a.calibration, a.seed)

    def ids(self, table: Table, targets: Labelled) -> Ragged:
        ignore, source = self.arguments.unknown_labels == "ignore", label_source(self.arguments)
        ids = label_ids(table, targets, self.labels, ignore, self.notes, source)
        if unlabelled := int((ids.lengths == 0).sum()):
            self.notes.append(f"{table.path}: {unlabelled} row(s) have no label")
        return ids

    def tensor(self, ids: Ragged, rows: np.ndarray) -> Tensor:
        """uint8: 1 for the labels of a row, else 0."""
        dense, counts = torch.zeros(len(rows), len(self.labels), dtype=torch.uint8), ids.lengths[rows]
        if counts.sum():
            dense[np.repeat(np.arange(len(rows)), counts), np.concatenate([ids[row] for row in rows])] = 1
        return dense

    def prepare(self, ids: dict[str, Ragged]) -> None:
        self.num_rows = len(ids["train"])
        self.positive = np.bincount(ids["train"].values, minlength=len(self.labels))
        self.loss = loss_of_arguments(self.arguments, self.positive, self.num_rows, self.labels, self.notes)
        self.loss_settings = self.loss.as_settings()
        per_label = UPDATES_PER_LABEL * int((self.positive > 0).sum())
        self.enough_updates = max(ENOUGH_UPDATES, min(per_label, MOST_UPDATES))
        if self.loss.pos_weight is not None:
            weights = self.loss.pos_weight.tolist()
            self.details["pos_weight"] = dict(zip(self.labels, weights, strict=True))
        if "validation" in ids and not len(ids["validation"].values):
            self.default_metric = "loss"  # precision is undefined without a label
            if self.arguments.metric_for_best_model is None:
                self.notes.append("no validation row has a label: the loss chooses the best model")
        per_row = self.positive.sum() / self.num_rows
        self.notes.append(f"{len(self.labels)} labels, {per_row:.2f} per training row")
        note_counts(self.labels, ids, self.arguments.streaming is not None, self.notes)
        is_single = self.arguments.problem_type is None and (ids["train"].lengths == 1).all()
        if is_single and len(self.labels) > 1 and not any("--label_separator" in x for x in self.notes):
            self.notes.append(
                "every training row has exactly one label; --problem_type single_label trains labels that "
                "exclude each other"
            )

    def check_best_metric(self, name: str, ids: Ragged) -> None:
        count = np.bincount(ids.values, minlength=len(self.labels))
        # The same metrics are undefined on these two rows as on all, and on each kind of column once.
        targets = np.unique([count > 0, count == len(ids)], axis=1)
        if multilabel_scores(np.zeros(targets.shape), targets, 0.0, targets)[name] is None:
            raise InputError(
                f"--metric_for_best_model {name} is undefined on these validation rows (every label has one "
                "class only); choose another, such as f1_micro or loss"
            )

    def fingerprint(self) -> dict[str, Any]:
        # Thresholds and temperatures are exported with the best model, which a resumed run may keep.
        fixed, objective = self.tuner.fixed, asdict(self.tuner.objective)
        threshold = objective if fixed is None else fixed.tolist()
        decisions = {"threshold": threshold, "calibration": self.tuner.calibration}
        return {"label_list": list(self.labels), "sampling": self.arguments.sampling, **decisions}

    # Training

    def initial_bias(self) -> np.ndarray:
        smoothing = self.arguments.label_smoothing_factor
        return prior_bias(self.positive, self.num_rows, self.loss.pos_weight, smoothing)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.loss(logits, targets.float())

    # Scores and predictions

    def score(self, predictions: Predictions, split: TextSplit) -> dict[str, float | None]:
        logits, labels = predictions["logits"], predictions["labels"]
        decisions = self.decisions(predictions, split)
        return multilabel_scores(logits, labels, self.loss.mean(logits, labels), decisions)

    def decisions(self, predictions: Predictions, split: TextSplit) -> np.ndarray:
        """(rows, labels) bool decisions at the exported model's thresholds, or at those of other folds."""
        rows = None if self.thresholds is None else split.content()
        return self.tuner.decide(predictions["logits"], predictions["labels"], self.thresholds, rows)

    def of_model(
        self, predict: Callable[[TextSplit], Predictions], validation: TextSplit | None
    ) -> MultiLabel:
        other = copy.copy(self)
        other.thresholds, other.tuner = None, replace(self.tuner, temperatures=1.0)
        if self.tuner.fixed is not None:
            return other
        logits, labels = np.zeros((2, 0, len(self.labels)))
        if validation is not None:
            best = predict(validation)
            logits, labels = best["logits"], best["labels"]
            other.tuner = replace(other.tuner, tuned_on=validation.content())
        other.thresholds = replace(other.tuner, calibration="none").fit(logits, labels).values
        return other

    def for_evaluate(self, predictions: Predictions, split: TextSplit) -> tuple[Any, Any]:
        return self.decisions(predictions, split).astype(int), predictions["labels"].astype(int)

    def lines(self, predictions: Predictions, split: TextSplit) -> Iterator[dict[str, Any]]:
        for row, logits in enumerate(predictions["logits"]):
            probabilities, truth = sigmoid(logits), predictions["labels"][row] if split.labelled else None
            given = probabilities >= self.thresholds
            if len(given) > ALL_PREDICTED:
                kept = given | (probabilities >= 0.5) | (truth > 0 if split.labelled else False)
                kept[np.argpartition(-probabilities, MAX_PREDICTED)[:MAX_PREDICTED]] = True
                shown = np.flatnonzero(kept)[np.argsort(-probabilities[kept], kind="stable")]
                chances = Likeliest(by_name([self.labels[label] for label in shown], probabilities[shown]))
            else:
                chances = by_name(self.labels, probabilities)
            line = {"labels": list(compress(self.labels, given)), "probabilities": chances}
            if split.labelled:
                line["reference"] = list(compress(self.labels, truth))
            yield line

    def explained(self) -> dict[str, Any]:
        return {"thresholds": dict(zip(self.labels, map(float, self.thresholds), strict=True))}

    def figures(self, best: Predictions, split: TextSplit) -> ReportContent:
        tuner = replace(self.tuner, temperatures=1.0)  # these logits are those before calibration
        return report_content(tuner, best["logits"], best["labels"], self.labels, split)

    def card_sections(self, folder: Path) -> list[str]:
        """With the per-label scores in the folder's metrics.json."""
        rows = read_metrics(folder / "metrics.json").get("eval_per_label") or []
        rows.sort(key=lambda row: -row["support"])
        return [CARD_NOTE, *section("Labels (validation)", rows)]

    # The exported model

    def fit(self, best: Predictions | None, split: TextSplit | None) -> dict[str, Any]:
        if best is None:
            self.fitted = self.tuner.fit(*np.zeros((2, 0, len(self.labels))))
            return {"eval_per_label": []}
        logits, labels = best["logits"], best["labels"]
        self.fitted, metrics = self.tuner.report(logits, labels, self.labels, split.content())
        return metrics

    def exported_outputs(self, logits: np.ndarray) -> np.ndarray:
        return self.fitted.probabilities(logits)

    def config_entries(self) -> dict[str, Any]:
        """The loss, so that later evaluations compute the same one. The temperatures for information only:
        the exported weights include them (`head.rescaled`)."""
        fitted, stored = self.fitted, self.loss.as_settings()
        calibrates = (fitted.temperatures != 1).any()
        return {
            "thresholds": fitted.values.tolist(),
            "threshold_tuning": fitted.tuning,
            "temperatures": fitted.temperatures.tolist() if calibrates else None,
            "pos_weight": stored.pop("pos_weight"),
            "label_smoothing_factor": stored.pop("label_smoothing") or None,
            "multilabel_loss": None if self.loss.kind == "bce" else stored,
        }

    @property
    def export_scale(self) -> tuple[np.ndarray, None]:
        return self.fitted.temperatures, None

    def use_exported(self, model: Any) -> None:
        fixed, config = self.tuner.fixed, model.config
        self.thresholds = thresholds_of(config) if fixed is None else fixed
        self.tuner = self.tuner.of_trained(config)
        self.loss = loss_of_config(config) or self.loss


# Training


def prior_bias(
    positive: np.ndarray, rows: int, pos_weight: np.ndarray | None, smoothing: float
) -> np.ndarray:
    """(labels,) initial bias of a new head: each label's log-odds in training, the constant logits with the
    lowest loss.

    `positive`: (labels,) number of the `rows` with each label. Half a row is added on both sides, so that the
    log-odds are finite. With `pos_weight` and smoothed targets they are those of the weighted targets' mean.
    This saves the first steps, which would learn that labels are rare (Lin et al.,
    arXiv:1708.02002, section 3.3).
    """
    ones = (1.0 if pos_weight is None else pos_weight) * (positive + 0.5)
    zeros, half = rows - positive + 0.5, smoothing / 2
    return np.log((ones * (1 - half) + zeros * half) / (zeros * (1 - half) + ones * half))


# Thresholds of the arguments


def fixed_thresholds(parts: Sequence[str] | None, labels: Sequence[str]) -> np.ndarray | None:
    """(labels,) the thresholds of --threshold; None without the argument. Each part is a number for all
    labels, LABEL=NUMBER, or a json file {"LABEL": NUMBER}; later parts win. Raises `InputError` for unknown
    and for missing labels."""
    if parts is None:
        return None
    thresholds, problems = {}, []
    for part in parts:
        name, _, number = part.rpartition("=")
        if as_number(part) is not None:
            values = dict.fromkeys(labels, part)
        elif name and as_number(number) is not None:
            values = {name: number}
        elif Path(part).suffix == ".json" or Path(part).is_file():
            try:
                values = read_object(part)
            except InputError as error:
                raise InputError(*(f"--threshold {problem}" for problem in error.problems)) from None
        else:
            problems.append(
                f"--threshold {part}: expected a number, LABEL=NUMBER, or a json file of labels and numbers"
            )
            continue
        for label, value in values.items():
            threshold = as_number(value)
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
        problems.append(
            f"--threshold lacks {len(missing)} label(s): {', '.join(missing[:20])}; put a number for all "
            "other labels first"
        )
    raise_problems(problems)
    return np.array([thresholds[label] for label in labels])


# The exported model


def thresholds_of(config: Any) -> np.ndarray:
    """(labels,) the thresholds in a configuration; 0.5 if it has none. Raises `InputError`."""
    stored = getattr(config, "thresholds", None)
    if stored is None:
        return np.full(config.num_labels, 0.5)
    with suppress(TypeError, ValueError):
        thresholds = np.asarray(stored, dtype=np.float64)
        if thresholds.shape == (config.num_labels,) and np.isfinite(thresholds).all():
            return thresholds
    raise InputError(
        f"model {config.name_or_path}: thresholds in its config.json are {stored!r:.80}, expected a number "
        f"for each of the {config.num_labels} labels"
    )
