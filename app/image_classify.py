"""Image classification with a small CNN or any image classifier of transformers.

    python app/image_classify.py --train_file IMAGES/train --validation_file IMAGES/val --output_dir runs/a
    python app/image_classify.py --train_file mnist --validation_file mnist --output_dir runs/mnist
    python app/image_classify.py --model_name_or_path google/vit-base-patch16-224 --train_file train.csv \\
        --output_dir runs/b
    accelerate launch --config_file accelerate_configs/ddp.yaml app/image_classify.py ...the same...
    deepspeed --num_gpus 8 app/image_classify.py --deepspeed ds_configs/zero2.json ...the same...
    torchrun --nproc_per_node 8 app/image_classify.py ...the same...

Images come from a folder per class, from csv, tsv, json, jsonl or parquet with a column of paths or images,
from MNIST's four idx files, or from a dataset of `datasets`. `best/` of a transformers model loads with
pipeline("image-classification"); README.md in the output folder shows how to load the small CNN.

Predict, with or without labels:

    python app/image_classify.py --do_predict --model_name_or_path runs/a/best --test_file FOLDER \\
        --output_dir runs/a
"""

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
    # Before torch is imported: --help and wrong arguments answer at once.
    arguments = read_arguments(Arguments, __doc__)

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoModelForImageClassification

from samerun import classes
from samerun.data.cache import content_key
from samerun.errors import InputError
from samerun.export import check_agreement, rows_to_check
from samerun.images import single_label
from samerun.images.data import Examples, Images, Targets, read_examples
from samerun.images.image_task import ImageSplit, ImageTask, check_colours, check_size
from samerun.images.transforms import Augmentation, load_processor, processing_of
from samerun.launch import Launch
from samerun.main import run
from samerun.models import pretrained
from samerun.models.small_cnn import SmallCNN, SmallCNNConfig
from samerun.plan import Modes
from samerun.task import Batch, Data, ModelCard, Predictions, ReportContent, check_finite

# Of probabilities, by the run's precision: the exported model computes in fp32.
TOLERANCE = {"no": 1e-4, "bf16": 5e-2, "fp16": 1e-2}


class ImageClassification(ImageTask):
    """Every image is one target."""

    name = "image_classify"
    default_metric = "accuracy"
    shown_metrics = ("loss", "accuracy", "top5_accuracy", "f1_macro")
    metric_names = shown_metrics
    baseline_name = "the commonest class"

    # Data

    def load(self, launch: Launch, modes: Modes) -> Data:
        a, examples = self.arguments, self.read(launch, modes, read_examples)
        # Test files may have no classes.
        names = {
            split: single_label.class_names(rows)
            for split, rows in examples.items()
            if split != "test" or rows.labels is not None
        }
        self.choose_model(examples.get("train"), names.get("train"))
        check_colours(a, self.processing, examples, self.inspected)
        numbers = {
            split: single_label.class_numbers(examples[split], names[split], self.labels) for split in names
        }
        if "train" in numbers:
            single_label.note_classes(numbers["train"], self.labels, self.notes)
        self.augmentation = Augmentation(self.processing.size, *a.changes)
        targets = {name: Targets(values, content_key([values.tobytes()])) for name, values in numbers.items()}
        return self.make_data(examples, targets, labels=self.labels)

    def choose_model(self, train: Examples | None, names: list[str] | None) -> None:
        """Sets `config`, `processor`, `processing`, `labels` and `smoothing`. `names`: the classes
        of the training images."""
        a, self.processor = self.arguments, None
        name_or_path = a.config_name or a.model_name_or_path
        if name_or_path is None and train is None:
            raise InputError("no model: give --model_name_or_path, or --do_train to train a small CNN")
        labels = None if train is None else classes.sorted_classes(names, train.declared)
        if name_or_path is None:
            self.config = single_label.new_small_cnn(a, train, self.inspected["train"], labels)
        else:
            self.config = pretrained.load_config(a)
            pretrained.check_model(a, self.config, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, "classify images")
        self.smoothing = a.label_smoothing_factor
        if train is None:  # the loss is that of the model's training
            self.smoothing = getattr(self.config, "label_smoothing_factor", self.smoothing)
        self.loss_settings = {"label_smoothing_factor": self.smoothing}
        self.own_labels = None if a.from_scratch else pretrained.own_labels(self.config)
        self.labels = pretrained.labels_of(self.config) if labels is None else labels
        self.column_order = self.labels
        if labels is not None and self.own_labels and sorted(self.own_labels) == sorted(labels):
            self.labels = self.own_labels  # in the model's order
        if train is not None and self.own_labels is not None:
            pretrained.note_changed_classes(self.own_labels, self.labels, self.notes)
        if isinstance(self.config, SmallCNNConfig):
            single_label.check_small_cnn(self.config, a)
            self.processing = single_label.small_cnn_processing(self.config)
        else:
            self.processor = load_processor(a, self.config, a.image_size)
            self.processing = processing_of(self.processor, getattr(self.config, "num_channels", 3))
            check_size(AutoModelForImageClassification, a, self.config, self.processing.size)

    def collator(self, name: str, images: Images, values: np.ndarray | None) -> Callable[..., Batch]:
        return partial(self.collate, images, values)

    def collate(
        self, images: Images, values: np.ndarray | None, rows: np.ndarray, epoch: int | None = None
    ) -> Batch:
        pixels, mode = [], self.processing.mode
        shape = (*self.processing.size, *([3] if mode == "RGB" else []))
        as_they_are = epoch is None and self.processor is None and images.are_arrays  # several times as fast
        for row in map(int, rows):
            if as_they_are and images[row].shape == shape:
                pixels.append(images[row])
            else:
                pixels.append(self.augment(images.load(row, mode), None, row, epoch)[0])
        inputs = {"pixel_values": self.processing.normalize(np.stack(pixels))}
        labels = None if values is None else torch.from_numpy(values[rows])
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels)

    # Training

    def build(self) -> torch.nn.Module:
        arguments, config = self.arguments, self.config
        single_label.configure(config, self.smoothing)
        if arguments.config_name is None and arguments.model_name_or_path is None:
            model = SmallCNN(config)
        else:
            of_model = arguments, config, self.own_labels, self.labels
            model, _ = pretrained.load_with_classes(AutoModelForImageClassification, *of_model)
        return self.with_batch_norm(self.limit_training(model))

    def num_targets(self, batch: Batch) -> torch.Tensor:
        return batch.is_real.sum()

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(pixel_values=batch.inputs["pixel_values"]).logits.float()
        smoothing = self.arguments.label_smoothing_factor
        losses = cross_entropy(logits, batch.labels, reduction="none", label_smoothing=smoothing)
        return (losses * batch.is_real).sum()

    # Evaluation and prediction

    def predict(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        outputs = {"logits": model(pixel_values=batch.inputs["pixel_values"]).logits.float()}
        return outputs if batch.labels is None else {**outputs, "labels": batch.labels}

    def score(self, predictions: Predictions, split: ImageSplit) -> dict[str, float | None]:
        check_finite(predictions["logits"], "logits", split.path, "images", split.images.name)
        return classes.single_label_scores(predictions["logits"], predictions["labels"], self.smoothing)

    def baseline(self, split: ImageSplit, seconds: float) -> dict[str, float | None]:
        train = self.splits.get("train")
        if train is None:
            return {}
        shares = np.bincount(train.targets.values, minlength=len(self.labels)) / len(train)
        logits = np.tile(np.log(np.maximum(shares, 1e-9), dtype=np.float32), (len(split), 1))
        return classes.single_label_scores(logits, split.targets.values, self.smoothing)

    def for_evaluate(self, predictions: Predictions, split: ImageSplit) -> tuple[Any, Any]:
        return predictions["logits"].argmax(axis=1), predictions["labels"]

    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        self.save_best(path, model, weights, partial(self.check_export, best))
        return {} if best is None else classes.evaluation(classes.confusion_of(best), self.labels)

    def check_export(self, best: Predictions | None, folder: Path) -> None:
        """Loads an exported folder and compares its probabilities with the run's."""
        model = self.load_exported(folder).eval()
        if best is None:
            return
        rows = rows_to_check(range(len(self.splits["validation"])))
        inputs = self.splits["validation"].collate(rows).inputs
        with torch.no_grad():
            exported = model(**inputs).logits.double().softmax(-1)
        expected = torch.as_tensor(best["logits"][rows]).double().softmax(-1)
        check_agreement("probabilities", exported, expected, self.tolerance(TOLERANCE))

    def previews(self, best: Predictions) -> dict[str, str]:
        table = classes.confusion_table(classes.confusion_of(best), self.labels)
        return {"confusion matrix": "\n".join(table)}

    def load_exported(self, path: str | Path) -> torch.nn.Module:
        return pretrained.load_exported(AutoModelForImageClassification, self.arguments, path)

    def lines(self, predictions: Predictions, split: ImageSplit) -> Iterator[dict[str, Any]]:
        check_finite(predictions["logits"], "logits", split.path, "images", split.images.name)
        references = predictions["labels"] if split.labelled else None
        lines = classes.prediction_lines(predictions["logits"], self.labels, references)
        if len(split.images.sources) == 1:
            return lines
        # The ids of several files are numbered through, so each line names its image.
        return ({"image": split.images.name(row), **line} for row, line in enumerate(lines))

    def figures(self, best: Predictions, split: ImageSplit) -> ReportContent:
        return classes.figures(classes.confusion_of(best), self.labels)

    def card(self, folder: Path) -> ModelCard:
        sections = classes.card_sections(folder, self.labels)
        tag, usage = "image-classification", single_label.USAGE
        if isinstance(self.config, SmallCNNConfig):
            tag, usage = None, single_label.SMALL_CNN_USAGE
        return ModelCard("Image classification", tag, usage, self.shown_metrics, sections)


if __name__ == "__main__":
    run(ImageClassification, arguments)
