"""Semantic segmentation of images with models of transformers, such as DeepLabV3+ and SegFormer.

    python app/segment.py --model_name_or_path nvidia/mit-b0 --train_file CAMVID/train \\
        --validation_file CAMVID/validation --output_dir runs/a
    accelerate launch --config_file accelerate_configs/ddp.yaml app/segment.py ...the same...
    deepspeed --num_gpus 8 app/segment.py --deepspeed ds_configs/zero2.json ...the same...
    torchrun --nproc_per_node 8 app/segment.py ...the same...

Images and masks come from images/ and masks/ with files of equal names, from CamVid's or Cityscapes' folders,
from csv, tsv, json, jsonl or parquet with columns image and label, or from a dataset of `datasets`. Masks
hold class numbers; classes.txt beside the folders names them. Scores and predicted masks are in each image's
own size. `best/` loads with pipeline("image-segmentation").

Predict, with or without true masks; predicted masks go to predictions/ in the output folder:

    python app/segment.py --do_predict --model_name_or_path runs/a/best --test_file FOLDER --output_dir runs/a
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from samerun.arguments import AdapterArguments
from samerun.cli import read_arguments
from samerun.images.arguments import MaskArguments


@dataclass(frozen=True, kw_only=True)
class Arguments(MaskArguments, AdapterArguments):
    """Masks"""


if __name__ == "__main__":
    arguments = read_arguments(
        Arguments, __doc__
    )  # before torch is imported: --help and wrong arguments answer at once

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING, AutoModelForSemanticSegmentation

from samerun.data.mask_bits import pack, packed_bytes, unpack
from samerun.images import masks, segmenter
from samerun.images.augmentation import Augmentation
from samerun.images.classifier import rows_to_check
from samerun.images.examples import Examples
from samerun.images.image_task import ImageSplit, ImageTask, Targets
from samerun.images.processing import Processing
from samerun.images.sources import Images, Inspection
from samerun.losses.segmentation import SegmentationLoss, balanced_class_weights
from samerun.main import run
from samerun.metrics.segmentation import by_class, count_confusion, iou, segmentation_scores
from samerun.models.adapters import adapted_name
from samerun.models.export import plain_model
from samerun.models.pretrained import (
    check_model,
    labels_of,
    load_config,
    load_model_and_new_names,
    own_labels,
)
from samerun.models.processors import load_processor
from samerun.output import predictions as output
from samerun.output import written
from samerun.plots import masks as plots
from samerun.reports.card import class_tables
from samerun.task import Batch, ModelCard, Predictions, ReportContent, check_finite, check_metric

KINDS = {"iou": "IoU", "dice": "Dice"}  # metric of a class -> header of a table


class Segmentation(ImageTask):
    """Every image is one target. Its loss is the mean cross-entropy of its pixels plus the Dice loss."""

    name = "segment"
    default_metric = "mean_iou"
    shown_metrics = ("loss", "mean_iou", "mean_dice", "pixel_accuracy")
    mask_fill = masks.IGNORED

    # Data

    def read_split(self, split: str, notes: list[str]) -> Examples | None:
        return masks.read_pairs(self.arguments, split, notes)

    def choose_model(
        self, examples: dict[str, Examples], inspected: dict[str, Inspection], notes: list[str]
    ) -> Processing:
        a = self.arguments
        if self.modes.predict:
            written.check_foreign(Path(a.output_dir), [output.folder_of(a).name])
            self.mask_files = segmenter.mask_names(examples["test"].ids)
        self.config = load_config(a)
        check_model(a, self.config, MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING, "segment images")
        processor, channels = load_processor(a, self.config, None), getattr(self.config, "num_channels", 3)
        size = (a.image_size * 2)[:2] if a.image_size else segmenter.default_size(processor)
        self.own_labels = None if a.from_scratch else own_labels(self.config)
        self.uses_windows = segmenter.uses_windows(a, processor, exported=self.own_labels is not None)
        # Windows work on one image at a time, and a batch would be padded to its largest.
        self.evaluation_rows = 1 if self.uses_windows else None
        self.overlap = getattr(self.config, "overlap", segmenter.OVERLAP) if a.overlap is None else a.overlap
        self.unused = segmenter.unused_parameters(self.config, channels, size)
        self.processor = segmenter.processor_for(processor, size, self.uses_windows)
        return segmenter.processing_for(self.processor, size, channels, a.config_name or a.model_name_or_path)

    def encode_targets(
        self, examples: dict[str, Examples], inspected: dict[str, Inspection], notes: list[str]
    ) -> dict[str, Targets]:
        a, class_weights = self.arguments, None
        splits = masks.inspect_masks(examples, inspected)
        self.classes = masks.choose_classes(a, splits.get("train"), self.own_labels, labels_of(self.config))
        self.num_classes, self.class_of_value = len(self.classes.names), self.classes.lookup_table()
        for split in splits.values():
            masks.check_values(split, self.classes)
        if "train" in splits:
            masks.note_classes(splits["train"], self.classes, notes)
            totals = splits["train"].class_totals(self.num_classes)
            class_weights = balanced_class_weights(totals) if a.class_weights == "balanced" else None
            if self.modes.evaluate:
                of_classes = [f"{kind}_{name}" for kind in KINDS for name in self.classes.names]
                check_metric(self.best_metric, [*self.shown_metrics, *of_classes], a)
        weights = a.cross_entropy_weight, a.dice_weight, class_weights
        loss = SegmentationLoss(*weights, masks.IGNORED, label_smoothing=a.label_smoothing_factor)
        self.loss_settings = loss.settings()
        self.loss = (
            loss if self.modes.train else loss.with_settings(getattr(self.config, "loss_settings", None))
        )
        self.sizes = {
            split: [(header.height, header.width) for header in inspected[split].headers]
            for split in inspected
        }
        return {name: Targets(split.masks, split.content, split.counts) for name, split in splits.items()}

    def mask_labels(self, mask: np.ndarray) -> np.ndarray:
        return self.class_of_value[mask]

    def make_augmentation(self) -> Augmentation:
        scales = self.arguments.random_scale or ((1.0, 1.0) if self.uses_windows else None)
        return replace(
            super().make_augmentation(),
            scales=scales,
            native=self.uses_windows,
            colour=self.processing.mean_colour,
        )

    def task_fingerprint(self) -> dict[str, Any]:
        a = self.arguments
        loss, scales = (
            [a.cross_entropy_weight, a.dice_weight, a.class_weights],
            list(self.augmentation.scales or ()),
        )
        return {
            "labels": self.classes.names,
            "ignored": sorted(self.classes.ignored),
            "loss": loss,
            "scales": scales,
        }

    def collate_to_evaluate(
        self, split: str, images: Images, targets: Targets | None, rows: np.ndarray
    ) -> Batch:
        """Keeps masks, and with windows images too, in their own size, padded to the largest of the batch.
        Inputs: `size`, (b, 2) height and width; for a test split, `mask`, an empty buffer of the size of a
        packed mask."""
        loaded = [images.load(int(row), self.processing.mode) for row in rows]
        sizes = torch.tensor([image.size[::-1] for image in loaded])
        largest, to_array = sizes.amax(0).tolist(), np.asarray if self.uses_windows else self.processing.fit
        pixels = [self.processing.normalize(np.stack([to_array(image)]))[0] for image in loaded]
        padded = segmenter.pad_and_stack(pixels, largest if self.uses_windows else self.processing.size, 0)
        inputs, labels = {"pixel_values": padded, "size": sizes}, None
        if split == "test":
            num_bytes = max(
                packed_bytes(height * width, self.num_classes) for height, width in self.sizes["test"]
            )
            inputs["mask"] = torch.empty(len(rows), num_bytes, dtype=torch.uint8)
        if targets is not None:
            truth = [self.mask_labels(np.asarray(targets.values.load_mask(int(row)))) for row in rows]
            labels = segmenter.pad_and_stack(
                [torch.from_numpy(mask) for mask in truth], largest, masks.IGNORED
            )
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels)

    # Training

    def build(self) -> torch.nn.Module:
        segmenter.configure(
            self.config, self.classes.names, overlap=self.overlap, loss_settings=self.loss.settings()
        )
        model, _ = load_model_and_new_names(AutoModelForSemanticSegmentation, self.arguments, self.config)
        if self.own_labels is not None and self.own_labels != self.classes.names:
            segmenter.renew_head(model)
        model = self.limit_training(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and adapted_name(name) not in self.unused)
        return self.with_batch_norm(model)

    def num_targets(self, batch: Batch) -> torch.Tensor:
        return batch.is_real.sum()

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits = segmenter.upsampled(
            model(pixel_values=batch.inputs["pixel_values"]).logits, batch.labels.shape[1:]
        )
        return (self.loss(logits, batch.labels) * batch.is_real).sum()

    # Evaluation and prediction

    def predict(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        rows = [self.predict_row(logits, batch, row) for row, logits in enumerate(self.logits(model, batch))]
        return {name: torch.stack([outputs[name] for outputs in rows]) for name in rows[0]}

    def logits(
        self, model: torch.nn.Module, batch: Batch, one_process: bool = False
    ) -> Iterator[torch.Tensor]:
        """Yields (1, classes, height, width) for each row in its own size. `one_process`: other processes do
        not call it."""
        pixels, sizes = batch.inputs["pixel_values"], batch.inputs["size"].tolist()
        if not self.uses_windows:
            return segmenter.whole_logits(model, pixels, sizes)
        windows = segmenter.Windows(self.processing.size, self.overlap, self.arguments.window_batch_size)
        return segmenter.window_logits(
            model, pixels, sizes, windows, self.launch.gathers_weights and not one_process
        )

    def predict_row(self, logits: torch.Tensor, batch: Batch, row: int) -> dict[str, torch.Tensor]:
        """Loss and counts of a labelled row; the packed mask of a test row."""
        predicted = logits.argmax(1).to(torch.uint8)
        outputs = {
            "largest_logit": torch.stack(logits.aminmax()).abs().amax()
        }  # NaN if any is, which argmax does not show
        if batch.labels is not None:
            truth = batch.labels[row : row + 1, : logits.shape[2], : logits.shape[3]]
            counted = count_confusion(predicted, truth, self.num_classes, masks.IGNORED)
            outputs |= {
                "loss": self.loss(logits, truth)[0],
                **{name: counts[0] for name, counts in counted.items()},
            }
        if "mask" in batch.inputs:
            packed = pack(predicted[0].cpu().numpy(), self.num_classes, batch.inputs["mask"].shape[1])
            outputs["mask"] = torch.from_numpy(packed).to(logits.device)
        return outputs

    def score(self, predictions: Predictions, split: ImageSplit) -> dict[str, float | None]:
        self.check_logits(predictions, split)
        scores = segmentation_scores(predictions["counts"].sum(0), self.classes.names)
        return {"loss": float(predictions["loss"].mean(dtype=np.float64)), **scores}

    def check_logits(self, predictions: Predictions, split: ImageSplit) -> None:
        check_finite(predictions["largest_logit"], "logits", split.path, "images", split.images.name)

    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        self.save_best(path, model, plain_model(model), weights, partial(self.check_export, best))
        return {}

    def check_export(self, best: Predictions | None, folder: Path) -> None:
        """Compares losses of the exported model on some validation rows with the run's. Keeps its masks for
        `overlays`."""
        model, split = self.load_exported(folder).eval(), self.splits.get("validation")
        if best is None:
            return
        self.examples, losses, rows = [], [], rows_to_check(len(split))
        for row in rows:
            batch = split.collate(np.array([row]))
            with torch.no_grad():
                (logits,) = self.logits(model, batch, one_process=True)
            losses.append(float(self.loss(logits, batch.labels)[0]))
            image = np.asarray(split.images.load(int(row), self.processing.mode))
            self.examples.append(
                (image, batch.labels[0].numpy(), logits[0].argmax(0).to(torch.uint8).numpy())
            )
        segmenter.check_losses(np.array(losses), best["loss"][rows], self.rounding)

    def previews(self, best: Predictions) -> dict[str, str | np.ndarray]:
        return {"image_truth_prediction": segmenter.overlays(self.examples, self.classes.names)}

    def load_exported(self, path: str | Path) -> torch.nn.Module:
        return self.load_trained(AutoModelForSemanticSegmentation, path)

    def lines(self, predictions: Predictions, split: ImageSplit) -> Iterator[dict[str, Any]]:
        """Also writes the masks."""
        self.check_logits(predictions, split)
        folder, files = output.folder_of(self.arguments), self.mask_files
        for row, packed in enumerate(predictions["mask"]):
            mask = unpack(packed, self.sizes["test"][row], self.num_classes)
            segmenter.write_mask(mask, folder / files[row])
            line = {"image": split.images.name(row), "mask": f"{folder.name}/{files[row]}"}
            scores = (
                {"iou": by_class(iou(predictions["counts"][row]), self.classes.names)}
                if split.labelled
                else {}
            )
            yield line | {"shares": segmenter.shares(mask, self.classes.names), **scores}

    def figures(self, best: Predictions, split: ImageSplit) -> ReportContent:
        return plots.show(best, self.classes.names, split.ids)

    def card(self, folder: Path) -> ModelCard:
        tables, metrics = class_tables(folder, self.classes.names, KINDS), list(self.shown_metrics)
        return ModelCard("Semantic segmentation", "image-segmentation", segmenter.USAGE, metrics, tables)


if __name__ == "__main__":
    run(Segmentation, arguments)
