"""Ways of training the same encoder-decoder on rows of one length, so that nobody pads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarking import application
from benchmarking.contenders.training import MAX_GRAD_NORM, TrainingContender, pad
from finetune.kernels.row_lengths import row_lengths

CHECKED_ROWS = 4  # training rows whose loss is taken before and after
LEARNING_RATE = 5e-5


def batch_size(settings: dict[str, Any], length: int) -> int:
    """Rows of `length` tokens per optimizer step: about the same number of tokens at every length."""
    return max(1, settings["tokens_per_step"] // length)


def options(settings: dict[str, Any], new: bool = True) -> application.Options:
    """The application's arguments of every use. `new`: a model from the section's configuration."""
    folder = Path(settings["inputs"], "model")
    model = {"config_name": folder, "tokenizer_name": folder, "from_scratch": True} if new else {}
    given = {"decoder_layers": "decoder_layers", "max_title_length": "title_length", "num_beams": "beams"}
    return application.run_options(settings) | model | {option: settings[name] for option, name in given.items()}


class Titles(TrainingContender):
    """settings: "length", "max_steps", and those of the inputs (see `title_inputs`)."""

    script = "titlegen"
    seq2seq = True

    def __init__(self, settings: dict[str, Any]) -> None:
        given = {"max_length": settings["length"], "batch_size": batch_size(settings, settings["length"])}
        super().__init__(settings | given | {"learning_rate": LEARNING_RATE})

    def options(self) -> application.Options:
        s = self.settings
        return options(s) | {
            "train_file": Path(s["inputs"], f"train_{s['length']}.jsonl"), "max_length": s["max_length"],
            "max_steps": s["max_steps"], "global_batch_size": s["batch_size"], "learning_rate": s["learning_rate"],
            "max_grad_norm": MAX_GRAD_NORM,
        }  # fmt: skip

    def plain_model(self) -> Any:
        return self.prepared.model(plain=True)

    def token_rows(self) -> tuple[dict[str, list], Any]:
        columns = application.token_columns(self.steps.split)
        return columns | {"length": [len(ids) for ids in columns["input_ids"]]}, self.task.tokenizer

    def pad_labels(self, labels: list[list[int]]) -> torch.Tensor:
        return pad(labels, max(map(len, labels)), -100)

    def before(self, model: Any) -> None:
        split = self.steps.split
        self.checked = split.collate(np.arange(min(CHECKED_ROWS, len(split)))).to(self.device)
        self.loss_before = self.mean_loss(model)

    @torch.no_grad()
    def mean_loss(self, model: Any) -> float:
        """Loss per title token of the checked rows, without dropout."""
        model.eval()
        with self.autocast(), row_lengths(self.checked.lengths):
            loss = float(self.task.loss_sum(model, self.checked) / self.task.num_targets(self.checked))
        model.train()
        return loss

    def result(self, model: Any, tokens: list[float], loss: float) -> dict[str, Any]:
        measured = self.watch.measurements()
        losses = {"loss_before": self.loss_before, "loss_after": self.mean_loss(model)}
        return measured | losses | {"units": tokens, "batch_size": self.settings["batch_size"]}


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    return Titles(settings).measure()


CONTENDERS = dict.fromkeys(("ours", "bare", "trainer_best", "trainer", "padded"), measure)
