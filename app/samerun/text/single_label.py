"""Single-label classification: a text has exactly one of several labels. Softmax and cross-entropy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from samerun import classes
from samerun.data.tables import Table
from samerun.data.tokens import Ragged
from samerun.errors import InputError
from samerun.kernels.common import constants
from samerun.models.pretrained import labels_of, own_labels
from samerun.task import Predictions, ReportContent
from samerun.text.labels import (
    Labelled,
    choose_labels,
    in_order_of_head,
    label_ids,
    label_source,
    note_counts,
    read_classes,
)
from samerun.text.losses import class_weights
from samerun.text.multi_label_scores import (
    expected_calibration_error,
    folds,
    lowest_temperatures,
    worst_texts,
)
from samerun.text.problem import Problem
from samerun.text.text import TextSplit

USAGE = """from transformers import pipeline
classify = pipeline("text-classification", model="best")
classify("a text", truncation=True)  # the label and its probability; top_k=None: of every label"""


class SingleLabel(Problem):
    """A row has one target, the number of its label. Targets of files are `Labelled`."""

    name, title, usage = "single_label", "Text classification", USAGE
    default_metric = "accuracy"
    shown_metrics = ("loss", "accuracy", "f1_macro", "f1_weighted", "matthews_correlation")
    metric_names = (*shown_metrics, f"top{classes.TOP}_accuracy")
    card_metrics = (*shown_metrics, "ece", "calibrated_ece")

    def __init__(self, arguments: Any) -> None:
        super().__init__(arguments)
        self.smoothing = arguments.label_smoothing_factor
        self.weight: np.ndarray | None = None  # (labels,) of the rows' losses
        self.temperature = 1.0

    # Targets

    def read(self, table: Table) -> Labelled | None:
        return read_classes(table, self.arguments.label_column, self.notes)

    def choose(self, config: Any, train: Labelled | None) -> None:
        self.labels = labels_of(config)
        if train is not None:
            names = classes.sorted_classes([name for (name,) in train.rows], train.declared, "rows")
            names = in_order_of_head(self.arguments, config, names, self.notes)
            self.labels = choose_labels(self.arguments, own_labels(config), names, self.notes)

    def ids(self, table: Table, targets: Labelled) -> Ragged:
        return label_ids(table, targets, self.labels, None, self.notes, label_source(self.arguments))

    def tensor(self, ids: Ragged, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(ids.values[rows].astype(np.int64))

    def prepare(self, ids: dict[str, Ragged]) -> None:
        self.count = np.bincount(ids["train"].values, minlength=len(self.labels))
        self.weight = class_weights(self.arguments, self.count, self.labels)
        if self.weight is not None:
            least, most = self.weight.min(), self.weight.max()
            self.notes.append(f"weights of classes: {least:.2f} to {most:.2f} (--pos_weight)")
            self.details["class_weight"] = dict(zip(self.labels, self.weight.tolist(), strict=True))
        self.loss_settings = {"label_smoothing_factor": self.smoothing, "class_weight": self.listed_weight}
        fewest, most = self.count.min(), self.count.max()
        self.notes.append(f"{len(self.labels)} labels, of {fewest} to {most} training rows each")
        note_counts(self.labels, ids, self.arguments.streaming is not None, self.notes)

    @property
    def listed_weight(self) -> list[float] | None:
        return None if self.weight is None else self.weight.tolist()

    def check_best_metric(self, name: str, ids: Ragged) -> None:
        if name == f"top{classes.TOP}_accuracy" and len(self.labels) <= classes.TOP:
            raise InputError(
                f"--metric_for_best_model {name} needs more than {classes.TOP} labels; choose accuracy"
            )

    def fingerprint(self) -> dict[str, Any]:
        own = {"problem_type": self.name, "label_list": self.labels}
        return {**own, "sampling": self.arguments.sampling, "calibration": self.arguments.calibration}

    # Training

    def initial_bias(self) -> np.ndarray:
        """The logarithm of each label's share of the training rows' weight: the constant logits with the
        lowest loss. Half a row is added, so that it is finite."""
        share = (1.0 if self.weight is None else self.weight) * (self.count + 0.5)
        return np.log(share / share.sum() * (1 - self.smoothing) + self.smoothing / len(share))

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = cross_entropy(logits, targets, reduction="none", label_smoothing=self.smoothing)
        if self.weight is None:
            return losses
        # By the true class: torch's `weight` would weight the smoothed share of each class by its own.
        return losses * constants(self.weight, logits)[targets]

    # Scores and predictions

    def score(self, predictions: Predictions, split: TextSplit) -> dict[str, float | None]:
        logits, labels = predictions["logits"], predictions["labels"]
        scores = classes.single_label_scores(logits, labels, self.smoothing, self.weight)
        more = classes.weighted_scores(classes.confusion_of(predictions)) if len(labels) else {}
        return {**dict.fromkeys(self.shown_metrics), **scores, **more}

    def for_evaluate(self, predictions: Predictions, split: TextSplit) -> tuple[Any, Any]:
        return predictions["logits"].argmax(axis=1), predictions["labels"]

    def lines(self, predictions: Predictions, split: TextSplit) -> Iterator[dict[str, Any]]:
        references = predictions["labels"] if split.labelled else None
        return classes.prediction_lines(predictions["logits"], self.labels, references)

    def figures(self, best: Predictions, split: TextSplit) -> ReportContent:
        logits, true = best["logits"], best["labels"]
        losses = -np.log(np.maximum(softmax(logits)[np.arange(len(true)), true], 1e-12))
        names = {"label": true, "predicted": logits.argmax(axis=1)}
        columns = {header: [self.labels[label] for label in column] for header, column in names.items()}
        figures, sections = classes.figures(classes.confusion_of(best), self.labels)
        return ReportContent(figures, [*sections, worst_texts(losses, columns, split)])

    def card_sections(self, folder: Path) -> list[str]:
        return classes.card_sections(folder, self.labels)

    # The exported model

    def fit(self, best: Predictions | None, split: TextSplit | None) -> dict[str, Any]:
        if best is None:
            return {}
        logits, true = best["logits"].astype(np.float64), best["labels"]
        metrics = classes.evaluation(classes.confusion_of(best), self.labels)
        metrics["eval_ece"] = top_label_error(logits, true)
        if self.arguments.calibration != "none" and len(true):
            self.temperature = fit_temperature(logits, true)
            held_out = logits.copy()
            for fold in folds(len(true), self.arguments.seed):
                held_out[fold] /= fit_temperature(logits[~fold], true[~fold])
            metrics["eval_calibrated_ece"] = top_label_error(held_out, true)
            for name, values in (("eval", logits), ("eval_calibrated", held_out)):
                metrics[f"{name}_cross_entropy"] = classes.single_label_scores(values, true)["loss"]
        return metrics

    def exported_outputs(self, logits: np.ndarray) -> np.ndarray:
        return softmax(logits / self.temperature)

    def config_entries(self) -> dict[str, Any]:
        temperatures = np.full(len(self.labels), self.temperature)
        return {
            "temperatures": temperatures.tolist() if self.temperature != 1 else None,
            "class_weight": self.listed_weight,
            "label_smoothing_factor": self.smoothing or None,
        }

    @property
    def export_scale(self) -> tuple[np.ndarray, None]:
        return np.full(len(self.labels), self.temperature), None

    def use_exported(self, model: Any) -> None:
        weight = getattr(model.config, "class_weight", None)
        self.weight = None if weight is None else np.asarray(weight, dtype=np.float64)
        self.smoothing = getattr(model.config, "label_smoothing_factor", None) or 0.0


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis, in float64."""
    return torch.as_tensor(logits).double().softmax(-1).numpy()


def fit_temperature(logits: np.ndarray, true: np.ndarray) -> float:
    """The temperature T with the lowest cross-entropy of softmax(logits / T) (Guo et al., arXiv:1706.04599,
    section 4.2). `logits`: (rows, labels) float64; `true`: (rows,) label numbers."""
    of_true = logits[np.arange(len(true)), true].sum()
    return float(lowest_temperatures(lambda t: (logits * softmax(logits / t)).sum() - of_true, 1)[0])


def top_label_error(logits: np.ndarray, true: np.ndarray) -> float | None:
    """Expected calibration error of the predicted label's probability (Guo et al., equation 3)."""
    hits = (logits.argmax(axis=1) == true)[:, None]
    return expected_calibration_error(softmax(logits).max(axis=1, keepdims=True), hits)
