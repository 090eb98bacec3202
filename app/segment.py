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

import sys
from dataclasses import dataclass

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from samerun.arguments import AdapterArguments
from samerun.cli import read_arguments
from samerun.files import replace_listed
from samerun.images.arguments import RESIZED_CROP, MaskArguments
from samerun.run_folder import check_foreign


@dataclass(frozen=True, kw_only=True)
class Arguments(MaskArguments, AdapterArguments):
    """Masks"""


if __name__ == "__main__":
    # Before torch is imported: --help and wrong arguments answer at once.
    arguments = read_arguments(Arguments, __doc__)

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING, AutoModelForSemanticSegmentation

from samerun import predictions as output
from samerun.errors import InputError
from samerun.export import check_agreement, rows_to_check
from samerun.images import masks, segmentation, semantic_segmentation
from samerun.images.data import Images, Targets
from samerun.images.image_task import ImageSplit, ImageTask, check_colours, check_size
from samerun.images.segmentation import SegmentationLoss
from samerun.images.transforms import Augmentation, load_processor
from samerun.launch import Launch
from samerun.main import run
from samerun.models import pretrained
from samerun.plan import Modes
from samerun.reports.card import class_tables
from samerun.runtime import join_rows
from samerun.task import Batch, Data, ModelCard, Predictions, ReportContent, check_finite, check_metric

KINDS = {"iou": "IoU", "dice": "Dice"}  # metric of a class -> header of a table
# Of losses, by the run's precision: the exported model computes in fp32.
TOLERANCE = {"no": 1e-3, "bf16": 2e-1, "fp16": 5e-2}


class Segmentation(ImageTask):
    """Every image is one target. Its loss is the mean cross-entropy of its pixels plus the Dice loss."""

    name = "segment"
    default_metric = "mean_iou"
    shown_metrics = ("loss", "mean_iou", "mean_dice", "pixel_accuracy")
    named_metrics = KINDS
    baseline_name = "the commonest class for all pixels"

    # Data

    def load(self, launch: Launch, modes: Modes) -> Data:
        a = self.arguments
        if modes.predict:
            check_foreign(Path(a.output_dir), [output.folder_of(a).name])
        examples = self.read(launch, modes, masks.read_pairs)
        self.choose_model()
        check_colours(a, self.processing, examples, self.inspected)
        targets = masks.inspect_masks(examples, self.inspected)
        self.choose_classes(targets)
        scales = a.random_scale or ((1.0, 1.0) if self.uses_windows else None)
        of_crops = {"scales": scales, "native": self.uses_windows, "colour": self.processing.mean_colour}
        self.augmentation = Augmentation(self.processing.size, *a.changes, fill=masks.IGNORED, **of_crops)
        # Windows work on one image at a time, and a batch would be padded to its largest.
        self.evaluation_rows = 1 if self.uses_windows else None
        loss = [a.cross_entropy_weight, a.dice_weight, a.class_weights]
        of_classes = {"labels": self.classes.names, "ignored": sorted(self.classes.ignored)}
        return self.make_data(examples, targets, **of_classes, loss=loss, scales=list(scales or ()))

    def choose_model(self) -> None:
        """Sets `config`, `processor`, `processing`, `own_labels`, `uses_windows` and `overlap`."""
        a = self.arguments
        self.config = pretrained.load_config(a)
        pretrained.check_model(a, self.config, MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING, "segment images")
        processor, channels = load_processor(a, self.config, None), getattr(self.config, "num_channels", 3)
        size = (a.image_size * 2)[:2] if a.image_size else semantic_segmentation.default_size(processor)
        # The classes of an image classifier, such as nvidia/mit-b0, are none of masks.
        is_classifier = "ForImageClassification" in str(self.config.architectures)
        self.own_labels = None if a.from_scratch or is_classifier else pretrained.own_labels(self.config)
        if self.own_labels is not None and getattr(processor, "do_reduce_labels", False):
            shift = "was trained with 1 for it and 0 for ignored pixels; lower the values of such masks by 1"
            self.notes.append(f"masks: 0 is the class {self.own_labels[0]!r}; the model {shift}")
        windows_are_default = self.own_labels is not None and not processor.do_resize  # as exported
        self.uses_windows = a.inference == "sliding_window" or (a.inference is None and windows_are_default)
        if self.uses_windows and a.random_crop is not None:
            raise InputError(RESIZED_CROP)
        own_overlap = getattr(self.config, "overlap", semantic_segmentation.OVERLAP)
        self.overlap = own_overlap if a.overlap is None else a.overlap
        check_size(AutoModelForSemanticSegmentation, a, self.config, size)
        self.processor = semantic_segmentation.processor_for(processor, size, self.uses_windows)
        self.processing = semantic_segmentation.processing_for(
            self.processor, size, channels, a.config_name or a.model_name_or_path
        )

    def choose_classes(self, splits: dict[str, Targets]) -> None:
        """Sets `classes`, `num_classes`, `class_of_value` and `loss`."""
        a, train = self.arguments, splits.get("train")
        self.classes = masks.choose_classes(a, train, self.own_labels, pretrained.labels_of(self.config))
        self.num_classes, self.class_of_value = len(self.classes.names), self.classes.lookup_table()
        for split in splits.values():
            masks.check_values(split, self.classes)
        class_weights = None
        if train is not None:
            masks.note_classes(train, self.classes, self.notes)
            if self.own_labels is not None:
                pretrained.note_changed_classes(self.own_labels, self.classes.names, self.notes)
            if a.class_weights == "balanced":
                totals = train.totals
                counts = [totals.get(number, 0) for number in range(self.num_classes)]
                class_weights = segmentation.balanced_class_weights(counts)
            if a.modes.evaluate:
                of_classes = [f"{kind}_{name}" for kind in KINDS for name in self.classes.names]
                check_metric(self.best_metric, [*self.shown_metrics, *of_classes], a)
        exported = getattr(self.config, "loss_settings", None)
        self.loss = SegmentationLoss.of(a, class_weights, exported)
        self.loss_settings = self.loss.settings()

    def collator(self, name: str, images: Images, values: Images | None) -> Callable[..., Batch]:
        if name == "train":
            return partial(self.collate, images, values)
        return partial(self.collate_whole, images, values, name == "test")

    def collate(self, images: Images, truth: Images, rows: np.ndarray, epoch: int | None = None) -> Batch:
        """The batch of these rows in the size of the model's input; with an epoch, augmented."""
        pixels, labels = [], []
        for row in map(int, rows):
            image, mask = images.load(row, self.processing.mode), truth.load_mask(row)
            image, mask = self.augment(image, mask, row, epoch)
            pixels.append(image)
            labels.append(self.class_of_value[mask])
        inputs = {"pixel_values": self.processing.normalize(np.stack(pixels))}
        truth = torch.from_numpy(np.stack(labels))
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, truth)

    def collate_whole(
        self, images: Images, truth: Images | None, keeps_masks: bool, rows: np.ndarray
    ) -> Batch:
        """The batch of these rows with masks, and with windows images too, in their own size, padded to the
        largest of the batch. Inputs: `size`, (b, 2) height and width; with `keeps_masks`, `keeps_mask`
        (b,)."""
        loaded = [images.load(int(row), self.processing.mode) for row in rows]
        sizes = torch.tensor([image.size[::-1] for image in loaded])
        largest, to_array = sizes.amax(0).tolist(), np.asarray if self.uses_windows else self.processing.fit
        pixels = [self.processing.normalize(np.stack([to_array(image)]))[0] for image in loaded]
        size = largest if self.uses_windows else self.processing.size
        inputs = {"pixel_values": semantic_segmentation.pad_and_stack(pixels, size, 0), "size": sizes}
        if keeps_masks:
            inputs["keeps_mask"] = torch.ones(len(rows), dtype=torch.bool)
        labels = None
        if truth is not None:
            own = [self.class_of_value[np.asarray(truth.load_mask(int(row)))] for row in rows]
            tensors = [torch.from_numpy(mask) for mask in own]
            labels = semantic_segmentation.pad_and_stack(tensors, largest, masks.IGNORED)
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels)

    # Training

    def build(self) -> torch.nn.Module:
        semantic_segmentation.configure(self.config, self.overlap, self.loss_settings)
        of_model = self.arguments, self.config, self.own_labels, self.classes.names
        model, _ = pretrained.load_with_classes(AutoModelForSemanticSegmentation, *of_model)
        return self.with_batch_norm(self.limit_training(model))

    def num_targets(self, batch: Batch) -> torch.Tensor:
        return batch.is_real.sum()

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(pixel_values=batch.inputs["pixel_values"]).logits
        logits = semantic_segmentation.upsampled(logits, batch.labels.shape[1:])
        return (self.loss(logits, batch.labels) * batch.is_real).sum()

    # Evaluation and prediction

    def predict(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        rows = [self.predict_row(logits, batch, row) for row, logits in enumerate(self.logits(model, batch))]
        return {name: join_rows([outputs[name][None] for outputs in rows]) for name in rows[0]}

    def logits(
        self, model: torch.nn.Module, batch: Batch, one_process: bool = False
    ) -> Iterator[torch.Tensor]:
        """Yields (1, classes, height, width) for each row in its own size. `one_process`: other processes do
        not call it."""
        pixels, sizes = batch.inputs["pixel_values"], batch.inputs["size"].tolist()
        if not self.uses_windows:
            logits = model(pixel_values=pixels).logits
            rows = zip(logits.split(1), sizes, strict=True)
            return (semantic_segmentation.upsampled(row, size) for row, size in rows)
        windows = {"overlap": self.overlap, "batch_size": self.arguments.window_batch_size}
        windows["equal_passes"] = self.launch.gathers_weights and not one_process
        return semantic_segmentation.window_logits(model, pixels, sizes, self.processing.size, **windows)

    def predict_row(self, logits: torch.Tensor, batch: Batch, row: int) -> dict[str, torch.Tensor]:
        """Loss and counts of a labelled row; the packed mask of a test row."""
        logits = logits[0]
        predicted = logits.argmax(0).to(torch.uint8)
        outputs = {"largest_logit": segmentation.largest_logit(logits)}
        if batch.labels is not None:
            truth = batch.labels[row, : logits.shape[1], : logits.shape[2]]
            outputs |= segmentation.scored_outputs(self.loss, logits, predicted, truth, self.num_classes)
        if "keeps_mask" in batch.inputs:
            packed = segmentation.pack(predicted.cpu().numpy(), self.num_classes)
            outputs["mask"] = torch.from_numpy(packed).to(logits.device)
        return outputs

    def score(self, predictions: Predictions, split: ImageSplit) -> dict[str, float | None]:
        self.check_logits(predictions, split)
        scores = segmentation.segmentation_scores(predictions["counts"].sum(0), self.classes.names)
        return {"loss": segmentation.mean_loss(predictions), **scores}

    def baseline(self, split: ImageSplit, seconds: float) -> dict[str, float | None]:
        train = self.splits.get("train")
        if train is None:
            return {}
        counts = train.targets.counts, split.targets.counts
        return segmentation.scores_of_commonest_class(*counts, self.classes.names)

    def check_logits(self, predictions: Predictions, split: ImageSplit) -> None:
        check_finite(predictions["largest_logit"], "logits", split.path, "images", split.images.name)

    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        self.save_best(path, model, weights, partial(self.check_export, best))
        return {}

    def check_export(self, best: Predictions | None, folder: Path) -> None:
        """Compares losses of the exported model on some validation rows with the run's. Keeps its masks for
        `overlays`."""
        model = self.load_exported(folder).eval()
        if best is None:
            return
        split, losses, self.examples = self.splits["validation"], [], []
        rows = rows_to_check(range(len(split)))
        for row in rows:
            batch = split.collate(np.array([row]))
            with torch.no_grad():
                (logits,) = self.logits(model, batch, one_process=True)
            losses.append(float(self.loss(logits, batch.labels)[0]))
            image = np.asarray(split.images.load(int(row), self.processing.mode))
            predicted = logits[0].argmax(0).to(torch.uint8).numpy()
            self.examples.append((image, batch.labels[0].numpy(), predicted))
        check_agreement("losses", losses, best["loss"][rows], self.tolerance(TOLERANCE))

    def previews(self, best: Predictions) -> dict[str, str | np.ndarray]:
        shown = semantic_segmentation.overlays(self.examples, self.classes.names)
        return {"image_truth_prediction": shown}

    def load_exported(self, path: str | Path) -> torch.nn.Module:
        return pretrained.load_exported(AutoModelForSemanticSegmentation, self.arguments, path)

    def lines(self, predictions: Predictions, split: ImageSplit) -> Iterator[dict[str, Any]]:
        """Also writes the masks."""
        self.check_logits(predictions, split)
        folder, names = output.folder_of(self.arguments), self.classes.names
        files = semantic_segmentation.mask_names(split.ids)
        replace_listed(folder, files, output.earlier_masks(self.arguments))
        for row, (file, header) in enumerate(zip(files, split.inspected.headers, strict=True)):
            size = header.height, header.width
            mask = segmentation.unpack(predictions["mask"][row], size, self.num_classes)
            image = Image.fromarray(mask)
            image.putpalette(semantic_segmentation.palette().tobytes())
            image.save(folder / file)
            line = {"image": split.images.name(row), "mask": f"{folder.name}/{file}"}
            line["shares"] = semantic_segmentation.shares(mask, names)
            if split.labelled:
                line["iou"] = segmentation.by_class(segmentation.iou(predictions["counts"][row]), names)
            yield line

    def figures(self, best: Predictions, split: ImageSplit) -> ReportContent:
        return segmentation.report_content(best, self.classes.names, split.ids)

    def card(self, folder: Path) -> ModelCard:
        tables, usage = class_tables(folder, self.classes.names, KINDS), semantic_segmentation.USAGE
        window = ",".join(map(str, self.processing.size))
        limits = [
            f"Metrics and masks of the run are of windows of {window} pixels, overlap {self.overlap:g} "
            "(--inference sliding_window). The code above reads whole images, which gives some pixels other "
            "classes, and fails for images that are smaller than the model's patches."
        ]
        about = usage, self.shown_metrics, tables, limits if self.uses_windows else ()
        return ModelCard("Semantic segmentation", "image-segmentation", *about)


if __name__ == "__main__":
    run(Segmentation, arguments)
