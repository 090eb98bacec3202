"""Contenders that train the image tasks."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarking import application
from benchmarking.contenders.training import MAX_GRAD_NORM, TrainingContender


class Images(TrainingContender):
    """settings: "task": the script of app/; "data": its folder with train/ and validation/ or split.csv;
    "batch_size", "learning_rate", "max_steps"; "task_options": further arguments of the script."""

    @property
    def script(self) -> str:
        return self.settings["task"]

    def options(self) -> application.Options:
        s, folder = self.settings, Path(self.settings["data"])
        files = {"train_file": folder}
        if (folder / "train").is_dir():
            files = {"train_file": folder / "train", "validation_file": folder / "validation"}
        return application.run_options(s) | files | s["task_options"]

    def trainer(self) -> dict[str, Any]:
        """transformers' Trainer with the task's model and loss, and rows decoded by our loader."""
        from transformers import Trainer

        from benchmarking.contenders import trainer

        arguments = trainer.arguments_of(self.settings, remove_unused_columns=False)
        task, split = self.prepared
        model, loss = application.build(task), partial(loss_of, task)
        hf_trainer = Trainer(model, arguments, train_dataset=Rows(split), compute_loss_func=loss)
        return self.measure_training(hf_trainer.model, hf_trainer.train)

    def monai(self) -> dict[str, Any]:
        """The loop of MONAI's tutorials: MONAI's transforms (cached before the first random one), loader and
        loss."""
        task, split = self.prepared
        model = application.build(task).to(self.device)
        files = [volume.file for volume in split.collate.__self__.volumes]
        batches = monai_batches(self.micro_batch, task.settings, files)
        return self.measure_training(model, partial(self.monai_steps, model, batches))

    def monai_steps(self, model: Any, batches: Iterator[dict[str, torch.Tensor]]) -> None:
        from monai.losses import DiceCELoss

        optimizer = self.optimizer(model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, self.settings["max_steps"])
        loss_of = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)
        bf16 = torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings["precision"] == "bf16")
        model.train()
        for _ in range(self.settings["max_steps"]):
            optimizer.zero_grad()
            for batch in islice(batches, self.choice["accumulation"]):
                with bf16:
                    logits = model(batch["image"].to(self.device))
                loss = loss_of(logits.float(), batch["label"].to(self.device))
                (loss / self.choice["accumulation"]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()


class Rows(torch.utils.data.Dataset):
    """Rows decoded and augmented by our loader."""

    def __init__(self, split: Any) -> None:
        self.split, self.batch_of = split, partial(split.augment, epoch=0) if split.augment else split.collate

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        batch = self.batch_of(np.array([number]))
        return {"pixel_values": batch.inputs["pixel_values"][0], "labels": batch.labels[0]}


def loss_of(task: Any, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The task's loss with the signature that Trainer expects."""
    from samerun.task import Batch

    batch = Batch(torch.arange(len(labels), device=labels.device), {"pixel_values": None}, labels)
    return task.loss_sum(lambda pixel_values: outputs, batch) / len(labels)


def monai_batches(rows_of_batch: int, known: Any, files: list[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches of random patches, half of them around foreground voxels, with random flips."""
    from monai import transforms as t
    from monai.data import CacheDataset, DataLoader

    both = ("image", "label")
    rows = [{"image": str(file.image), "label": str(file.label)} for file in files]
    steps = [
        t.LoadImaged(both, ensure_channel_first=True), t.Orientationd(both, axcodes="RAS", labels=None),
        t.Spacingd(both, known.spacing, mode=("bilinear", "nearest")), t.NormalizeIntensityd("image"),
        t.SpatialPadd(both, known.patch_size),
        t.RandCropByPosNegLabeld(both, "label", known.patch_size, num_samples=rows_of_batch),
        *(t.RandFlipd(both, prob=0.5, spatial_axis=axis) for axis in range(3)),
    ]  # fmt: skip
    data = CacheDataset(rows, t.Compose(steps), progress=False)
    while True:
        yield from DataLoader(data, batch_size=1, shuffle=True)


CONTENDERS = dict.fromkeys(("ours", "trainer", "monai"), Images.measure)
