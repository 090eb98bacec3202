"""Image classification with a small CNN or any image classifier of transformers.

    python app/image_classify.py --train_file IMAGES/train --validation_file IMAGES/val --output_dir runs/a
    python app/image_classify.py --train_file mnist --validation_file mnist --output_dir runs/mnist
    python app/image_classify.py --model_name_or_path google/vit-base-patch16-224 --train_file train.csv \\
        --output_dir runs/b
    accelerate launch --config_file accelerate_configs/ddp.yaml app/image_classify.py ...the same...
    deepspeed --num_gpus 8 app/image_classify.py --deepspeed ds_configs/zero2.json ...the same...
    torchrun --nproc_per_node 8 app/image_classify.py ...the same...

Images come from a folder per class, from csv, tsv, json, jsonl or parquet with a column of paths or images,
from MNIST's idx files, or from a dataset of `datasets`. `best/` of a transformers model loads with
pipeline("image-classification"); README.md in the output folder shows how to load the small CNN.

Predict, with or without labels:

    python app/image_classify.py --do_predict --model_name_or_path runs/a/best --test_file FOLDER \\
        --output_dir runs/a
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from samerun.arguments import AdapterArguments
from samerun.cli import read_arguments
from samerun.images.arguments import ImageArguments
from samerun.parsing import option


@dataclass(frozen=True, kw_only=True)
class Arguments(ImageArguments, AdapterArguments):
    """Classes"""

    label_column: str = option("label", help="column of an image's class")
    image_size: int | None = option(
        at_least=16,
        help="resize images to N x N pixels (default: the model's size; for a small CNN, the images' own)",
    )


if __name__ == "__main__":
    arguments = read_arguments(
        Arguments, __doc__
    )  # before torch is imported: --help and wrong arguments answer at once

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoModelForImageClassification

from samerun.errors import InputError
from samerun.images import classifier
from samerun.images.examples import Examples
from samerun.images.image_task import ImageSplit, ImageTask, Targets
from samerun.images.processing import Processing, processing_of
from samerun.images.sources import Inspection, JoinedImages
from samerun.main import run
from samerun.metrics.single_label import confusion_matrix, per_class_table, single_label_scores
from samerun.models.export import plain_model
from samerun.models.pretrained import check_model, load_config, load_model_and_new_names, on_meta, own_labels
from samerun.models.processors import load_processor
from samerun.models.small_cnn import SmallCNN, SmallCNNConfig, load_small_cnn, read_config, save_small_cnn
from samerun.output.run_folder import replace_folder
from samerun.plots import classes as class_plots
from samerun.task import Batch, ModelCard, Predictions, ReportContent, check_finite


class ImageClassification(ImageTask):
    """Every image is one target."""

    name = "image_classify"
    default_metric = "accuracy"
    shown_metrics = ("loss", "accuracy", "top5_accuracy", "f1_macro")
    metric_names = shown_metrics

    # Data

    def choose_model(
        self, examples: dict[str, Examples], inspected: dict[str, Inspection], notes: list[str]
    ) -> Processing:
        arguments, self.processor = self.arguments, None
        name_or_path = arguments.config_name or arguments.model_name_or_path
        if name_or_path is None and "train" not in examples:
            raise InputError("no model: give --model_name_or_path, or --do_train to train a small CNN")
        # Test files may have no classes.
        self.names = {
            split: classifier.class_names(rows)
            for split, rows in examples.items()
            if _has_classes(split, rows)
        }
        classes = (
            classifier.sorted_classes(self.names["train"], examples["train"].declared)
            if "train" in examples
            else None
        )
        self.config = read_config(name_or_path)
        if name_or_path is None:
            self.config = classifier.new_small_cnn(arguments, examples["train"], inspected["train"], classes)
        elif self.config is None:
            self.config = load_config(arguments)
            check_model(arguments, self.config, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, "classify images")
            self.processor = load_processor(arguments, self.config, arguments.image_size)
        self.smoothing = arguments.label_smoothing_factor
        if not self.modes.train:  # the loss is that of the model's training
            self.smoothing = getattr(self.config, "label_smoothing_factor", self.smoothing)
        self.loss_settings = {"label_smoothing_factor": self.smoothing}
        self.own_labels = None if arguments.from_scratch else own_labels(self.config)
        self.labels = classifier.choose_labels(self.own_labels, classes, self.config)
        if isinstance(self.config, SmallCNNConfig):
            self.config = classifier.with_labels(self.config, self.labels, arguments)
            return classifier.small_cnn_processing(self.config)
        return processing_of(self.processor, getattr(self.config, "num_channels", 3))

    def encode_targets(
        self, examples: dict[str, Examples], inspected: dict[str, Inspection], notes: list[str]
    ) -> dict[str, Targets]:
        numbers = {
            split: classifier.class_numbers(examples[split], names, self.labels)
            for split, names in self.names.items()
        }
        if "train" in numbers:
            classifier.note_classes(numbers["train"], self.labels, notes)
        return {split: Targets.of_numbers(class_numbers) for split, class_numbers in numbers.items()}

    def task_fingerprint(self) -> dict[str, Any]:
        return {"labels": self.labels}

    # Training

    def build(self) -> torch.nn.Module:
        arguments, config = self.arguments, self.config
        if isinstance(config, SmallCNNConfig):
            if arguments.lora_r or arguments.freeze or arguments.layerwise_lr_decay:
                raise InputError(
                    "--lora_r, --freeze and --layerwise_lr_decay are for models of transformers, "
                    "not for the small CNN"
                )
            trained = (
                arguments.model_name_or_path is not None and not arguments.from_scratch and not on_meta()
            )
            model = load_small_cnn(arguments.model_name_or_path, config) if trained else SmallCNN(config)
        else:
            classifier.configure(config, self.labels, self.smoothing)
            model, _ = load_model_and_new_names(AutoModelForImageClassification, arguments, config)
            if self.own_labels is not None and self.own_labels != self.labels:
                classifier.renew_head(model)
            model = self.limit_training(model)
        return self.with_batch_norm(model)

    def num_targets(self, batch: Batch) -> torch.Tensor:
        return batch.is_real.sum()

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(pixel_values=batch.inputs["pixel_values"]).logits.float()
        smoothing = self.arguments.label_smoothing_factor
        return (
            cross_entropy(logits, batch.labels, reduction="none", label_smoothing=smoothing) * batch.is_real
        ).sum()

    # Evaluation and prediction

    def predict(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        outputs = {"logits": model(pixel_values=batch.inputs["pixel_values"]).logits.float()}
        return outputs if batch.labels is None else {**outputs, "labels": batch.labels}

    def score(self, predictions: Predictions, split: ImageSplit) -> dict[str, float | None]:
        check_finite(predictions["logits"], "logits", split.path, "images", split.images.name)
        return single_label_scores(predictions["logits"], predictions["labels"], self.smoothing)

    def as_references(self, predictions: Predictions, split: ImageSplit) -> tuple[Any, Any]:
        return predictions["logits"].argmax(axis=1), predictions["labels"]

    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        check, metrics = self.load_exported, {}
        if best is not None:
            confusion = confusion_matrix(best["logits"].argmax(axis=1), best["labels"], len(self.labels))
            metrics = {
                "eval_per_class": per_class_table(confusion, self.labels),
                "eval_confusion_matrix": confusion.tolist(),
            }
            split = self.splits["validation"]
            rows = classifier.rows_to_check(len(split))
            inputs, precision = split.collate(rows).inputs["pixel_values"], self.rounding
            check = partial(
                classifier.check_export, self.load_exported, inputs, best["logits"][rows], precision
            )
        if isinstance(self.config, SmallCNNConfig):
            replace_folder(path, partial(save_small_cnn, self.config, weights, check))
        else:
            self.save_best(path, model, plain_model(model), weights, check)
        return metrics

    def previews(self, best: Predictions) -> dict[str, str]:
        confusion = confusion_matrix(best["logits"].argmax(axis=1), best["labels"], len(self.labels))
        return {"confusion matrix": "\n".join(classifier.confusion_table(confusion.tolist(), self.labels))}

    def load_exported(self, path: str | Path) -> torch.nn.Module:
        config = read_config(path)  # None unless it is a small CNN
        if config is not None:
            return load_small_cnn(path, config)
        return self.load_trained(AutoModelForImageClassification, path)

    def lines(self, predictions: Predictions, split: ImageSplit) -> Iterator[dict[str, Any]]:
        check_finite(predictions["logits"], "logits", split.path, "images", split.images.name)
        references = predictions["labels"] if split.labelled else None
        lines = classifier.prediction_lines(predictions["logits"], self.labels, references)
        if not isinstance(split.images, JoinedImages):
            return lines
        # The ids of several files are numbered through, so each line names its image.
        return ({"image": split.images.name(row), **line} for row, line in enumerate(lines))

    def figures(self, best: Predictions, split: ImageSplit) -> ReportContent:
        return class_plots.show(best["logits"].argmax(axis=1), best["labels"], self.labels)

    def card(self, folder: Path) -> ModelCard:
        sections = classifier.card_sections(folder, self.labels)
        if isinstance(self.config, SmallCNNConfig):
            return ModelCard(
                "Image classification", None, classifier.SMALL_CNN_USAGE, classifier.CARD_METRICS, sections
            )
        return ModelCard(
            "Image classification",
            "image-classification",
            classifier.USAGE,
            classifier.CARD_METRICS,
            sections,
        )


def _has_classes(split: str, examples: Examples) -> bool:
    return split != "test" or examples.classes is not None


if __name__ == "__main__":
    run(ImageClassification, arguments)
