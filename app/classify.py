"""Multi-label text classification: one encoder, one logit per label, binary cross-entropy.

    python app/classify.py --model_name_or_path MODEL --train_file train.csv --validation_file valid.csv \\
        --output_dir runs/a
    accelerate launch --config_file accelerate_configs/ddp.yaml app/classify.py ...the same...
    deepspeed --num_gpus 8 app/classify.py --deepspeed ds_configs/zero2.json ...the same...
    torchrun --nproc_per_node 8 app/classify.py ...the same...

Every launch trains on the same batches and gives the same model up to round-off. `best/` in the output folder
is a plain transformers model: pipeline("text-classification", model="runs/a/best", top_k=None).

Prediction needs no labels:

    python app/classify.py --do_predict --model_name_or_path runs/a/best --test_file new.csv \\
        --output_dir runs/a
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from samerun.cli import read_arguments
from samerun.data.tables import Table
from samerun.data.tokens import Ragged
from samerun.parsing import option
from samerun.text.arguments import DecisionArguments, LongDocumentArguments, LossArguments, TextArguments


@dataclass(frozen=True, kw_only=True)
class Arguments(DecisionArguments, LossArguments, LongDocumentArguments, TextArguments):
    """Labels"""

    label_column: str = option(
        "labels", help="column of the labels: a list, or one text split at --label_separator"
    )
    label_separator: str = option("|", help="what separates labels in a text")
    label_columns: tuple[str, ...] | None = option(
        help="columns of 0 and 1, one per label, instead of --label_column"
    )
    label_file: str | None = option(
        reads=True,
        per_machine=True,
        help="file with one label per line; default: order of first appearance in training",
    )
    unknown_labels: str = option(
        "error",
        choices=("error", "ignore"),
        help="labels in validation or test data that training does not have",
    )
    head_bias: str = option(
        "prior", choices=("prior", "zero"), help="bias of a new head: the labels' log-odds, or zero"
    )
    head_learning_rate: float | None = option(
        above=0, help="peak learning rate of the new head (default: --learning_rate)"
    )


if __name__ == "__main__":
    arguments = read_arguments(
        Arguments, __doc__
    )  # before torch is imported: --help and wrong arguments answer at once

from collections.abc import Iterator
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

from samerun.errors import InputError
from samerun.main import run
from samerun.models import pretrained
from samerun.models.adapters import limit_training
from samerun.task import Batch, ModelCard, Predictions, ReportContent
from samerun.text import multilabel
from samerun.text.multilabel import Labelled, MultiLabelLoss
from samerun.text.multilabel_scores import (
    METRICS,
    Objective,
    ThresholdTuner,
    multilabel_scores,
    report_content,
    sigmoid,
)
from samerun.text.splits import TextSplit, check_finite
from samerun.text.text_task import TextTask


class MultiLabelClassification(TextTask):
    """A row has one target per label."""

    name = "classify"
    default_metric = "average_precision_macro"  # needs no threshold; F1 of rare labels may stay 0 for epochs
    shown_metrics = (
        "loss",
        "f1_micro",
        "f1_macro",
        "tuned_f1_micro",
        "tuned_f1_macro",
        "average_precision_macro",
    )
    metric_names = METRICS
    evaluates_by_tokens = True
    thresholds: np.ndarray | None = (
        None  # of the exported model; None before: decisions by held-out thresholds
    )
    tuner = ThresholdTuner()

    @property
    def list_separator(self) -> str:
        return self.arguments.label_separator

    # Data

    def target_columns(self) -> tuple[str, ...]:
        return self.arguments.label_columns or (self.arguments.label_column,)

    def read_targets(self, table: Table, split: str, notes: list[str]) -> Labelled | None:
        return multilabel.read_labels(table, self.arguments, notes)

    def load_model_config(self, targets: dict[str, Labelled | None], notes: list[str]) -> Any:
        arguments = self.arguments
        config = pretrained.load_config(arguments)
        pretrained.check_model(arguments, config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "classify texts")
        if "train" in targets:
            own, train_labels = pretrained.own_labels(config), targets["train"].names
            path = " ".join(arguments.train_file or [arguments.dataset_name])
            head_notes = [] if arguments.from_scratch else notes
            self.labels = multilabel.choose_labels(own, train_labels, arguments.label_file, head_notes, path)
        else:
            self.labels = pretrained.labels_of(config)
        objective = Objective(
            arguments.threshold_objective, arguments.threshold_target or 0.0, arguments.miss_cost
        )
        fixed = multilabel.fixed_thresholds(arguments.threshold, self.labels)
        self.tuner = ThresholdTuner(fixed, objective, arguments.calibration, arguments.seed)
        return config

    def encode_targets(self, table: Table, targets: Labelled, notes: list[str]) -> Ragged:
        ignore, source = self.arguments.unknown_labels == "ignore", multilabel.label_source(self.arguments)
        return multilabel.label_ids(table, targets, self.labels, ignore, notes, source)

    def prepare_targets(self, tables: dict[str, Table], encoded: dict[str, Ragged], notes: list[str]) -> None:
        arguments = self.arguments
        self.loss = MultiLabelLoss(label_smoothing=arguments.label_smoothing_factor)
        if "train" not in tables:
            return
        self.num_train_rows = len(encoded["train"])
        self.positive = np.bincount(encoded["train"].values, minlength=len(self.labels))
        self.loss = multilabel.loss_of_arguments(
            arguments, self.positive, self.num_train_rows, self.labels, notes
        )
        self.loss_settings = self.loss.as_settings()
        if self.loss.pos_weight is not None:
            self.details["pos_weight"] = dict(zip(self.labels, self.loss.pos_weight.tolist(), strict=True))
        multilabel.note_labels(tables, encoded, self.labels, notes)
        if "validation" in encoded and not len(encoded["validation"].values):
            self.default_metric = "loss"  # precision is undefined without a label
        if "validation" in encoded and self.best_metric in self.metric_names:
            multilabel.check_best_metric(self.best_metric, encoded["validation"], len(self.labels))

    def target_tensor(self, targets: Ragged, rows: np.ndarray) -> torch.Tensor:
        return multilabel.one_hot(targets, rows, len(self.labels))

    def task_fingerprint(self) -> dict[str, Any]:
        return {"label_list": list(self.labels), "sampling": self.arguments.sampling}

    def sampling_weights(self, targets: Ragged) -> np.ndarray | None:
        return (
            multilabel.class_balanced(targets, len(self.labels))
            if self.arguments.sampling == "class_balanced"
            else None
        )

    # Training

    def build(self) -> torch.nn.Module:
        arguments, config = self.arguments, self.config
        own, new_rows = None if arguments.from_scratch else pretrained.own_labels(config), None
        renamed = own is not None and own != self.labels
        if not renamed:
            multilabel.configure(config, self.labels)
        if arguments.from_scratch:
            pretrained.take_vocabulary(config, self.tokenizer)
        config.pad_token_id = self.tokenizer.pad_token_id
        model, new_names = pretrained.load_model_and_new_names(
            AutoModelForSequenceClassification, arguments, config
        )
        if renamed:
            new_rows = multilabel.replace_output_layer(model, own, self.labels)
            multilabel.configure(config, self.labels)
        if arguments.head_bias == "prior":
            smoothing = arguments.label_smoothing_factor
            bias = multilabel.prior_bias(self.positive, self.num_train_rows, self.loss.pos_weight, smoothing)
            multilabel.set_head_bias(model, new_names, bias, new_rows)
        if config.model_type == "big_bird":
            pretrained.drop_pooler(model.bert)  # its classifier reads the first token itself
        multilabel.check_calibration(arguments.calibration, model, len(self.labels))
        return self.with_kernels(limit_training(model, arguments, new_names))

    def learning_rate_scale(self, model: torch.nn.Module, parameter: str) -> float:
        rate = self.arguments.head_learning_rate
        is_head = not parameter.startswith(f"{model.base_model_prefix}.")
        return (
            rate / self.arguments.learning_rate
            if rate and is_head
            else super().learning_rate_scale(model, parameter)
        )

    def num_targets(self, batch: Batch) -> torch.Tensor:
        return batch.is_real.sum() * len(self.labels)

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(**batch.inputs).logits.float()
        return (self.loss(logits, batch.labels.float()) * batch.is_real[:, None]).sum()

    # Evaluation and prediction

    def predict(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        outputs = {"logits": model(**batch.inputs).logits.float()}
        return outputs if batch.labels is None else {**outputs, "labels": batch.labels.to(torch.uint8)}

    def score(self, predictions: Predictions, split: TextSplit) -> dict[str, float | None]:
        check_finite(predictions["logits"], "logits", split)
        logits, labels = predictions["logits"], predictions["labels"]
        tuned = self.tuner.decide(logits, labels, self.thresholds, split.content())
        return multilabel_scores(logits, labels, self.loss.mean(logits, labels), tuned)

    def as_references(self, predictions: Predictions, split: TextSplit) -> tuple[Any, Any]:
        logits, labels = predictions["logits"], predictions["labels"]
        tuned = self.tuner.decide(logits, labels, self.thresholds, split.content())
        return tuned.astype(int), labels.astype(int)

    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        fitted, metrics, checked = (
            self.tuner.fit(*np.zeros((2, 0, len(self.labels)))),
            {"eval_per_label": []},
            {},
        )
        if best is not None:
            split = self.splits["validation"]
            fitted, metrics = self.tuner.report(best["logits"], best["labels"], self.labels, split.content())
            rows = multilabel.rows_to_check(split.lengths)
            checked = {split.texts[row]: fitted.probabilities(best["logits"][row]) for row in rows}
        check = partial(multilabel.check_export, expected=checked, precision=self.rounding)
        plain = multilabel.plain_model(model, fitted, self.loss)
        self.save_best(
            path, model, plain, weights, check, change=partial(multilabel.calibrated, plain, fitted)
        )
        return metrics

    def load_exported(self, path: str | Path) -> torch.nn.Module:
        model, new_names = self.load_for_prediction(AutoModelForSequenceClassification, path)
        if new_names:
            raise InputError(f"{path}: has no trained classifier ({min(new_names)} is missing); train first")
        self.thresholds = (
            multilabel.thresholds_of(model.config) if self.tuner.fixed is None else self.tuner.fixed
        )
        self.tuner = self.tuner.of_trained(model.config)
        self.loss = multilabel.loss_of_config(model.config) or self.loss
        return self.with_kernels(model)

    def lines(self, predictions: Predictions, split: TextSplit) -> Iterator[dict[str, Any]]:
        check_finite(predictions["logits"], "logits", split)
        for row, logits in enumerate(predictions["logits"]):
            probabilities = sigmoid(logits)
            line = {
                "labels": list(compress(self.labels, probabilities >= self.thresholds)),
                "probabilities": {
                    label: round(float(p), 6) for label, p in zip(self.labels, probabilities, strict=True)
                },
            }
            if split.labelled:
                line["reference"] = list(compress(self.labels, predictions["labels"][row]))
            yield line

    def figures(self, best: Predictions, split: TextSplit) -> ReportContent:
        return report_content(self.tuner, best["logits"], best["labels"], self.labels, split.texts)

    def card(self, folder: Path) -> ModelCard:
        return multilabel.model_card(folder, self.config, self.limits)


if __name__ == "__main__":
    run(MultiLabelClassification, arguments)
