"""Segmentation of volumes (NIfTI): MONAI's 3-D U-Net on random patches, sliding windows over whole volumes.

    python app/segment3d.py --config app/recipes/segment3d_classic.yaml --train_file FOLDER \\
        --output_dir runs/a
    accelerate launch --config_file accelerate_configs/ddp_bf16.yaml app/segment3d.py ...the same...
    deepspeed --num_gpus 8 app/segment3d.py --deepspeed ds_configs/zero2.json ...the same...
    torchrun --nproc_per_node 8 app/segment3d.py ...the same...

FOLDER has images/ and labels/ with files of equal names and, if it holds several splits, split.csv with
columns file and split (train, validation, test). Volumes are resampled to one orientation and voxel size and
normalised to mean 0 and deviation 1. Scores and predictions are in each file's own grid. `best/` holds
model.safetensors and config.json; the run's README.md shows how to load them with MONAI alone.

Predict, with or without labels; masks go to predictions/ in the output folder:

    python app/segment3d.py --do_predict --model_name_or_path runs/a/best --test_file FOLDER \\
        --output_dir runs/a

Needs: pip install -r requirements-vision.txt
"""

import sys
from dataclasses import dataclass

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from samerun.cli import read_arguments
from samerun.run_folder import check_foreign
from samerun.volumes.arguments import VolumeArguments


@dataclass(frozen=True, kw_only=True)
class Arguments(VolumeArguments):
    """Volumes"""


if __name__ == "__main__":
    arguments = read_arguments(Arguments, __doc__)  # before torch and MONAI are imported, which takes seconds

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samerun import predictions as output
from samerun.data.cache import content_hash, content_key
from samerun.files import replace_folder
from samerun.images import segmentation
from samerun.images.segmentation import EqualPasses, SegmentationLoss
from samerun.launch import Launch
from samerun.main import run
from samerun.plan import Modes
from samerun.reports.card import class_tables
from samerun.runtime import join_rows
from samerun.task import (
    Batch,
    Data,
    Mixture,
    ModelCard,
    Predictions,
    ReportContent,
    Split,
    Task,
    check_finite,
    check_metric,
)
from samerun.volumes import data, network, nifti
from samerun.volumes.data import Prepared, Volumes
from samerun.volumes.network import Settings
from samerun.volumes.output import WholeVolumes, overlays, volume_facts, write_masks
from samerun.volumes.patches import Augmentation, Patches

KINDS = {"dice": "Dice", "iou": "IoU", "hd95": "95% Hausdorff, mm"}  # metric of a class -> header of a table


class VolumeSegmentation(Task):
    """Every patch is one target. Its loss is the mean cross-entropy of its voxels plus the Dice loss."""

    name = "segment3d"
    default_metric = "mean_dice"
    shown_metrics = ("loss", "mean_dice", "mean_iou", "mean_hd95")
    named_metrics, lower_is_better = ("dice", "iou"), ("hd95", "mean_hd95")
    memory_advice = "a smaller --patch_size or --window_batch_size, "

    # Data

    def load(self, launch: Launch, modes: Modes) -> Data:
        arguments, notes, self.launch = self.arguments, self.notes, launch
        if modes.predict:
            check_foreign(Path(arguments.output_dir), [output.folder_of(arguments).name])
        files = data.find_splits(arguments, modes, notes)
        data.check_headers(files, notes)
        self.prepared = prepared = self.prepare(files)
        weights = arguments.class_weights
        self.loss = SegmentationLoss.of(arguments, weights, self.settings.loss, include_background=False)
        self.loss_settings = self.loss.settings()
        self.settings = replace(self.settings, loss=self.loss_settings)
        classes = self.settings.classes
        self.whole = {
            name: WholeVolumes(volumes, files[name].labelled, name == "test", len(classes))
            for name, volumes in prepared.items()
            if name != "train"
        }
        splits = {name: whole.split(files[name].path) for name, whole in self.whole.items()}
        if modes.train:
            splits["train"] = self.patch_split(prepared["train"], files["train"])
            notes.insert(0, self.settings.training_note(prepared["train"], arguments.patches_per_volume))
            if modes.evaluate:
                of_classes = (f"{kind}_{name}" for kind in KINDS for name in classes[1:])
                check_metric(self.best_metric, [*self.shown_metrics, *of_classes], arguments)
        return Data(splits, self.run_fingerprint(prepared), notes)

    def prepare(self, files: dict[str, Volumes]) -> dict[str, list[Prepared]]:
        """Reads the settings of an exported model, or chooses them; prepares the volumes."""
        a, path = self.arguments, self.arguments.model_name_or_path
        exported = None if path is None else Settings.read(path).updated(a)
        spacing = exported.spacing if exported else network.choose_spacing(a.spacing, files["train"])
        prepared = {name: data.prepare(volumes, spacing, a.ignore_index) for name, volumes in files.items()}
        classes = exported.classes if exported else data.choose_classes(prepared["train"], a.class_names)
        network.check_weights(a.class_weights, classes)
        for volumes in prepared.values():
            data.check_values(volumes, classes, self.notes)
        self.settings = exported or Settings.choose(a, classes, spacing, prepared["train"])
        return prepared

    def patch_split(self, volumes: list[Prepared], files: Volumes) -> Split:
        a, settings = self.arguments, self.settings
        augmentation = Augmentation(
            a.random_rotation, a.random_scale, a.random_intensity, a.random_noise, settings.spacing
        )
        sampling = a.patches_per_volume, a.foreground_share, a.flip_axes, a.seed
        patches = Patches(volumes, settings.patch_size, *sampling, augmentation)
        source = np.repeat(files.source, a.patches_per_volume)  # unused without weights
        mixture = Mixture.of(source, a.mixing_weights, files.sources, self.notes)
        return Split(files.path, patches.batch, len(patches), augment=patches.batch, mixture=mixture)

    def run_fingerprint(self, prepared: dict[str, list[Prepared]]) -> dict[str, Any]:
        a, path = self.arguments, self.arguments.model_name_or_path
        trained = {name: volumes for name, volumes in prepared.items() if name != "test"}
        contents = {n: content_key(v.content for v in volumes)[:16] for n, volumes in trained.items()}
        changes = a.random_rotation, list(a.random_scale or ()), a.random_intensity, a.random_noise
        return {
            "model": self.settings.as_dict(),
            "weights": path and content_hash(Path(path) / network.WEIGHTS)[:16],
            "patches": [a.patches_per_volume, a.foreground_share, *a.flip_axes],
            "augmentation": list(changes),
            **{f"{name}_volumes": len(volumes) for name, volumes in trained.items()},
            **{f"{name}_content": content for name, content in contents.items()},
        }

    # Training

    def build(self) -> torch.nn.Module:
        model = self.settings.build()
        if self.arguments.model_name_or_path is not None and next(model.parameters()).device.type != "meta":
            network.load_weights(model, self.arguments.model_name_or_path)
        return model

    def num_targets(self, batch: Batch) -> torch.Tensor:
        return batch.is_real.sum()

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return (self.loss(model(batch.inputs["image"]), batch.labels) * batch.is_real).sum()

    # Evaluation and prediction

    def predict(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        images = batch.inputs["image"]
        passes = EqualPasses(model, images.device, self.launch.gathers_weights)
        rows = [self.predict_volume(passes, batch, row) for row in range(len(batch.rows))]
        passes.fill_up(images.new_zeros(1, 1, *self.settings.patch_size))
        return {name: join_rows([outputs[name][None] for outputs in rows]) for name in rows[0]}

    def predict_volume(self, model: EqualPasses, batch: Batch, row: int) -> dict[str, torch.Tensor]:
        """Loss and counts of a labelled volume, in its file's grid; the packed mask or a slice of it."""
        a, num_classes = self.arguments, len(self.settings.classes)
        image, size, spacing = volume_facts(batch, row)
        logits = network.volume_logits(model, image, size, self.settings, a.window_batch_size)
        predicted = network.classes_of(logits)
        mask, scores = predicted.cpu().numpy(), {"largest_logit": segmentation.largest_logit(logits)}
        if batch.labels is not None:
            truth = batch.labels[row][tuple(map(slice, size))]
            scores |= segmentation.scored_outputs(self.loss, logits, predicted, truth, num_classes)
            distances = network.hausdorff95(mask, truth.cpu().numpy(), spacing, num_classes)
            scores["hd95"] = torch.from_numpy(distances).to(logits.device)
        split = self.whole["test" if "keeps_mask" in batch.inputs else "validation"]
        return scores | split.mask_output(batch, row, mask)

    def score(self, predictions: Predictions, split: Split) -> dict[str, float | None]:
        """Each class's metrics as means over volumes, and their means over classes."""
        self.check_logits(predictions, split)
        scores: dict[str, float | None] = {"loss": segmentation.mean_loss(predictions)}
        for kind, values in self.values_by_kind(predictions).items():
            means = [segmentation.mean_of_defined(of_class) for of_class in values.T]
            scores[f"mean_{kind}"] = segmentation.mean_of_defined(np.array(means, dtype=np.float64))
            for name, mean in zip(self.settings.classes[1:], means, strict=True):
                scores[f"{kind}_{name}"] = mean
        return scores

    def values_by_kind(self, predictions: Predictions) -> dict[str, np.ndarray]:
        """Each of KINDS -> (volumes, classes without the background)."""
        counts, distances = predictions["counts"], predictions["hd95"].astype(np.float64)
        values = segmentation.dice(counts), segmentation.iou(counts), distances
        return {kind: of_kind[:, 1:] for kind, of_kind in zip(KINDS, values, strict=True)}

    def check_logits(self, predictions: Predictions, split: Split) -> None:
        name = [str(volume) for volume in split.ids].__getitem__
        check_finite(predictions["largest_logit"], "logits", split.path, "volumes", name)

    def export(
        self, path: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor], best: Predictions | None
    ) -> dict[str, Any]:
        replace_folder(path, partial(self.settings.write, weights))
        return {}

    def previews(self, best: Predictions) -> dict[str, str | np.ndarray]:
        shown = overlays(self.whole["validation"], best["slice"], self.settings.classes[1:])
        return {"image_truth_prediction": shown}

    def load_exported(self, path: str | Path) -> torch.nn.Module:
        return Settings.read(path).load_model(path)

    def lines(self, predictions: Predictions, split: Split) -> Iterator[dict[str, Any]]:
        """Also writes the masks."""
        whole, names = self.whole["test"], self.settings.classes[1:]
        self.check_logits(predictions, split)
        folder = output.folder_of(self.arguments)
        scores = self.values_by_kind(predictions) if split.labelled else {}
        masks = write_masks(whole, predictions["mask"], folder, output.earlier_masks(self.arguments))
        for row, (path, mask) in enumerate(masks):
            volume = whole.volumes[row]
            voxels = np.bincount(mask.ravel(), minlength=len(names) + 1)[1:]
            millilitres = voxels * nifti.voxel_volume(volume.file.image) / 1000
            line = {"image": str(volume.file.image), "mask": path}
            line["millilitres"] = dict(zip(names, millilitres.round(6).tolist(), strict=True))
            yield line | {kind: segmentation.by_class(values[row], names) for kind, values in scores.items()}

    def figures(self, best: Predictions, split: Split) -> ReportContent:
        return segmentation.report_content(best, self.settings.classes, split.ids, first=1)

    def card(self, folder: Path) -> ModelCard:
        tables = class_tables(folder, self.settings.classes[1:], KINDS)
        return ModelCard("Segmentation of volumes", None, network.USAGE, self.shown_metrics, tables)


if __name__ == "__main__":
    run(VolumeSegmentation, arguments)
