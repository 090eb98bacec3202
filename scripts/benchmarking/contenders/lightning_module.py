"""A classifier for Lightning, and Lightning's Trainer."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything

from benchmarking.contenders.training import MAX_GRAD_NORM


class Classifier(LightningModule):
    def __init__(self, model: Any, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        # transformers loads models in evaluation mode, and Lightning does not change the mode.
        self.model, self.make_optimizer = model.train(), optimizer

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.make_optimizer(self.model)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(settings: dict[str, Any], cuda: bool) -> Trainer:
    """A Trainer for all epochs on one device, without logs and checkpoints."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(settings["seed"], verbose=False)
    return Trainer(
        accelerator="gpu" if cuda else "cpu", devices=1, max_epochs=settings.get("epochs", 1),
        gradient_clip_val=MAX_GRAD_NORM,
        accumulate_grad_batches=settings["choice"]["accumulation"],
        precision="bf16-mixed" if settings["precision"] == "bf16" else "32-true",
        default_root_dir=settings["folder"],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
