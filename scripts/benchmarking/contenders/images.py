"""Ways of training the image tasks, and their loaders."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarking import application
from benchmarking.contenders.timing import timed
from benchmarking.contenders.training import MAX_GRAD_NORM, TrainingContender
from benchmarking.watch import Stopped

SPLITS = ("train", "validation")


class Images(TrainingContender):
    """settings: "task", the script of app/; "data", its folder with train/ and validation/ or split.csv; "batch_size",
    "learning_rate", "max_steps"; "task_options", more arguments of the script."""

    @property
    def script(self) -> str:
        return self.settings["task"]

    def options(self) -> application.Options:
        s = self.settings
        folder = Path(s["data"])
        files = {f"{split}_file": folder / split for split in SPLITS} if (folder / "train").is_dir() else {"train_file": folder}
        trained = {"global_batch_size": s["batch_size"], "learning_rate": s["learning_rate"], "max_steps": s["max_steps"]}
        return application.run_options(s) | files | trained | s["task_options"]

    def before(self, model: Any) -> None:
        """Nothing: first turns do not count."""

    def result_of_steps(self, model: Any, loss: float) -> dict[str, Any]:
        return self.watch.measurements() | {"loss": loss}

    def train_with_trainer(self) -> dict[str, Any]:
        """transformers' Trainer with fused AdamW, the task's model and loss, and each row as our loader decodes it."""
        from transformers import Trainer

        from benchmarking.contenders import trainer

        task, loss, train = self.task, math.nan, self.prepared.steps.split
        batch_of = train.augment or train.collate

        def row(number: int) -> dict[str, torch.Tensor]:
            batch = batch_of(np.array([number]), *([0] if train.augment else []))
            return {"pixel_values": batch.inputs["pixel_values"][0], "labels": batch.labels[0]}

        arguments = trainer.arguments_of(self.settings, optim="adamw_torch_fused", remove_unused_columns=False)
        trained = Trainer(
            self.prepared.model(), arguments, train_dataset=Rows(len(train), row), callbacks=[trainer.Marks(self.watch)],
            compute_loss_func=LossOf(task),
        )  # fmt: skip
        with suppress(Stopped):
            loss = trained.train().training_loss
        return self.result_of_steps(trained.model, loss)

    def train_with_monai(self) -> dict[str, Any]:
        """The loop of MONAI's tutorials: its transforms, with all but the random ones kept in memory, its loader and loss."""
        model, losses = self.prepared.model().to(self.device), []
        loss_of = monai_loss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.settings["learning_rate"], fused=True)
        with suppress(Stopped):
            model.train()
            self.watch.mark()
            volumes = self.prepared.steps.split.collate.__self__.volumes
            batches = monai_batches(self.settings, self.task.settings, [volume.file for volume in volumes])
            for batch in islice(batches, self.settings["max_steps"]):
                image, label = batch["image"].to(self.device), batch["label"].to(self.device)
                optimizer.zero_grad()
                with self.autocast():
                    logits = model(image)
                loss = loss_of(logits.float(), label)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                losses.append(loss.detach())
                self.watch.mark()
        return self.result_of_steps(model, float(torch.stack(losses).mean()))


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int, row: Any) -> None:
        self.count, self.row = count, row

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self.row(number)


class LossOf:
    """The task's loss of a model's outputs, as Trainer wants it."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        from finetune.task import Batch

        batch = Batch(torch.arange(len(labels)), {"pixel_values": None}, labels)
        return self.task.loss_sum(lambda pixel_values: outputs, batch) / len(labels)


def monai_loss() -> Any:
    from monai.losses import DiceCELoss

    return DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)


def monai_batches(settings: dict[str, Any], known: Any, files: list[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Without end: random patches around voxels of a class as often as elsewhere, flipped at random."""
    from monai import transforms as t
    from monai.data import CacheDataset, DataLoader

    both = ("image", "label")
    rows = [{"image": str(file.image), "label": str(file.label)} for file in files]
    steps = [
        t.LoadImaged(both, ensure_channel_first=True), t.Orientationd(both, axcodes="RAS", labels=None),
        t.Spacingd(both, known.spacing, mode=("bilinear", "nearest")), t.NormalizeIntensityd("image"),
        t.SpatialPadd(both, known.patch_size),
        t.RandCropByPosNegLabeld(both, "label", known.patch_size, num_samples=settings["batch_size"]),
        *(t.RandFlipd(both, prob=0.5, spatial_axis=axis) for axis in range(3)),
    ]  # fmt: skip
    data = CacheDataset(rows, t.Compose(steps), progress=False)
    while True:
        yield from DataLoader(data, batch_size=1, shuffle=True)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    return Images(settings).measure()


def measure_monai(settings: dict[str, Any]) -> dict[str, Any]:
    return Images(settings).train_with_monai()


def measure_loader(settings: dict[str, Any]) -> dict[str, Any]:
    """Rows that a core decodes, varies and normalises in a second; the first epoch warms the disk's cache."""
    images = Images(settings)
    train, size = images.steps.split, settings["batch_size"]
    batch_of = train.augment or train.collate
    batches = [np.arange(start, min(start + size, len(train))) for start in range(0, len(train), size)]

    def epoch(number: int) -> None:
        for rows in batches:
            batch_of(rows, *([number] if train.augment else []))

    samples = [timed(lambda number=number: epoch(number), torch.device("cpu")) for number in range(1 + settings["epochs"])][1:]
    return {"rows/s": [len(train) / sample.cpu_seconds for sample in samples]}


CONTENDERS = dict.fromkeys(("ours", "bare", "trainer"), measure) | {"monai": measure_monai, "loader": measure_loader}
