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
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

from samerun.data.tables import Table
from samerun.data.tokens import Ragged
from samerun.errors import InputError
from samerun.main import run
from samerun.models import pretrained
from samerun.models.adapters import check_quantization, limit_training
from samerun.models.contributions import words_of_likeliest
from samerun.plan import Modes
from samerun.runtime import Launch
from samerun.task import Batch, Data, ModelCard, Predictions, ReportContent
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
from samerun.text.text import TextSplit, TextTask, check_outputs


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
    thresholds: np.ndarray | None = None  # of the exported model; None before: those of other folds decide
    tuner = ThresholdTuner()

    @property
    def list_separator(self) -> str:
        return self.arguments.label_separator

    # Data

    def load(self, launch: Launch, modes: Modes) -> Data:
        a, notes = self.arguments, []
        self.launch, self.modes = launch, modes
        check_quantization(a, launch)
        tables, labels = self.read(modes, notes)

        self.config = pretrained.load_config(a)
        pretrained.check_model(a, self.config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "classify texts")
        self.labels = pretrained.labels_of(self.config)
        if modes.train:
            own, path = pretrained.own_labels(self.config), " ".join(a.train_file or [a.dataset_name])
            head_notes = [] if a.from_scratch else notes
            self.labels = multilabel.choose_labels(own, labels["train"].names, a.label_file, head_notes, path)
        fixed = multilabel.fixed_thresholds(a.fixed_thresholds, self.labels)
        objective = Objective(**a.threshold_objective)
        self.tuner = ThresholdTuner(fixed, objective, a.calibration, a.seed)

        tokenizer = self.load_tokenizer(
            [tables["train"].columns[a.text_column]] if modes.train else [], notes
        )
        self.use_tokenizer(tokenizer, self.config, 512, notes)
        ids = self.all_ids(tables, labels, notes)
        self.loss = MultiLabelLoss(label_smoothing=a.label_smoothing_factor)
        if modes.train:
            self.prepare_training(ids, notes)
            multilabel.note_labels(tables, ids, self.labels, notes)
        data = self.data(tables, ids, notes, {"label_list": list(self.labels), "sampling": a.sampling})
        if modes.train and a.sampling == "class_balanced":
            weights = multilabel.class_balanced(ids["train"], len(self.labels))
            self.splits["train"] = replace(self.splits["train"], weights=weights)
        return data

    @property
    def target_columns(self) -> tuple[str, ...]:
        return self.arguments.label_columns or (self.arguments.label_column,)

    def read_targets(self, table: Table, split: str, notes: list[str]) -> Labelled | None:
        return multilabel.read_labels(table, self.arguments, notes)

    def ids_of_targets(self, table: Table, targets: Labelled, notes: list[str]) -> Ragged:
        ignore, source = self.arguments.unknown_labels == "ignore", multilabel.label_source(self.arguments)
        return multilabel.label_ids(table, targets, self.labels, ignore, notes, source)

    def target_tensor(self, targets: Ragged, rows: np.ndarray) -> torch.Tensor:
        return multilabel.one_hot(targets, rows, len(self.labels))

    def prepare_training(self, ids: dict[str, Ragged], notes: list[str]) -> None:
        """Sets the loss and the metric of the best model. `ids`: label ids of each row, by split."""
        a, self.num_train_rows = self.arguments, len(ids["train"])
        self.positive = np.bincount(ids["train"].values, minlength=len(self.labels))
        self.loss = multilabel.loss_of_arguments(a, self.positive, self.num_train_rows, self.labels, notes)
        self.loss_settings = self.loss.as_settings()
        if self.loss.pos_weight is not None:
            self.details["pos_weight"] = dict(zip(self.labels, self.loss.pos_weight.tolist(), strict=True))
        if "validation" in ids and not len(ids["validation"].values):
            self.default_metric = "loss"  # precision is undefined without a label
        if "validation" in ids and self.best_metric in self.metric_names:
            multilabel.check_best_metric(self.best_metric, ids["validation"], len(self.labels))

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
        if rate and is_head:
            return rate / self.arguments.learning_rate
        return self.rate_by_layer(self.config, parameter)

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
        logits, labels = predictions["logits"], predictions["labels"]
        check_outputs(logits, "logits", split)
        decisions = self.decisions(predictions, split)
        return multilabel_scores(logits, labels, self.loss.mean(logits, labels), decisions)

    def decisions(self, predictions: Predictions, split: TextSplit) -> np.ndarray:
        """(rows, labels) bool decisions at the exported model's thresholds, or at those of other folds."""
        rows = None if self.thresholds is None else split.content()
        return self.tuner.decide(predictions["logits"], predictions["labels"], self.thresholds, rows)

    def for_evaluate(self, predictions: Predictions, split: TextSplit) -> tuple[Any, Any]:
        return self.decisions(predictions, split).astype(int), predictions["labels"].astype(int)

    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        if best is None:
            fitted, metrics = self.tuner.fit(*np.zeros((2, 0, len(self.labels)))), {"eval_per_label": []}
            checked = {}
        else:
            split = self.splits["validation"]
            fitted, metrics = self.tuner.report(best["logits"], best["labels"], self.labels, split.content())
            rows = multilabel.rows_to_check(split.lengths)
            checked = {split.texts[row]: fitted.probabilities(best["logits"][row]) for row in rows}
        plain = multilabel.plain_model(model, fitted, self.loss)
        check = partial(multilabel.check_export, expected=checked, precision=self.rounding)
        self.save_best(path, model, plain, weights, check, partial(multilabel.calibrated, plain, fitted))
        return metrics

    def load_exported(self, path: str | Path) -> torch.nn.Module:
        model, new_names = self.load_for_prediction(AutoModelForSequenceClassification, path)
        if new_names:
            raise InputError(f"{path}: has no trained classifier ({min(new_names)} is missing); train first")
        fixed = self.tuner.fixed
        self.thresholds = multilabel.thresholds_of(model.config) if fixed is None else fixed
        self.tuner = self.tuner.of_trained(model.config)
        self.loss = multilabel.loss_of_config(model.config) or self.loss
        return self.with_kernels(model)

    def lines(self, predictions: Predictions, split: TextSplit) -> Iterator[dict[str, Any]]:
        check_outputs(predictions["logits"], "logits", split)
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

    def explain(self, model: torch.nn.Module, item: str, line: dict[str, Any]) -> dict[str, Any]:
        """The thresholds, and the contributions of the first `max_length` tokens' words to the likeliest
        labels."""
        encoded = self.tokenizer(
            item,
            truncation=True,
            max_length=self.max_length,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        has_windows = self.long_documents.method == "windows"
        return {
            "thresholds": dict(zip(self.labels, map(float, self.thresholds), strict=True)),
            "words": words_of_likeliest(model, encoded, line["probabilities"], has_windows),
        }

    def figures(self, best: Predictions, split: TextSplit) -> ReportContent:
        return report_content(self.tuner, best["logits"], best["labels"], self.labels, split.texts)

    def card(self, folder: Path) -> ModelCard:
        return multilabel.model_card(folder, self.config, self.limits)


if __name__ == "__main__":
    run(MultiLabelClassification, arguments)
