"""Ways of training the same encoder-decoder on rows of one length, so that nobody pads."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarking import application
from benchmarking.contenders.training import MAX_GRAD_NORM, TrainingContender, pad
from finetune.kernels.row_lengths import known

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

    task = "titlegen"
    seq2seq = True

    def __init__(self, settings: dict[str, Any]) -> None:
        given = {"max_length": settings["length"], "batch_size": batch_size(settings, settings["length"])}
        super().__init__(settings | given | {"learning_rate": LEARNING_RATE})

    def options(self) -> application.Options:
        s = self.settings
        return options(s) | {
            "train_file": Path(s["inputs"], f"train_{s['length']}.jsonl"), "max_length": s["max_length"],
            "max_steps": s["max_steps"], "global_batch_size": s["batch_size"], "learning_rate": s["learning_rate"],
            "max_grad_norm": MAX_GRAD_NORM, "torch_compile": s["contender"] == "ours_compiled",
        }  # fmt: skip

    @cached_property
    def loss(self) -> Any:
        return self.prepared.title_loss()

    def plain_model(self) -> Any:
        """The same weights with transformers' own attention."""
        return self.prepared.title_model(plain=True)

    def bare_model(self) -> Any:
        return self.prepared.title_model()

    def token_rows(self) -> tuple[dict[str, list], Any]:
        columns = application.token_columns(self.prepared.data.train)
        return columns | {"length": [len(ids) for ids in columns["input_ids"]]}, self.prepared.data.tokenizer

    def pad_labels(self, labels: list[list[int]]) -> torch.Tensor:
        return pad(labels, max(map(len, labels)), -100)

    def loss_sum(self, model: Any, batch: Any) -> torch.Tensor:
        return self.loss.loss_sum(model, batch)

    def num_targets(self, batch: Any) -> Any:
        return self.loss.num_targets(batch)

    def before(self, model: Any, training: Any = None) -> None:
        if training is not None:
            self.loss = training.task
        steps = self.prepared.steps if training is None else training.steps
        self.checked = steps.collate(np.arange(min(CHECKED_ROWS, len(steps.lengths)))).to(self.device)
        self.loss_before = self.mean_loss(model)

    @torch.no_grad()
    def mean_loss(self, model: Any) -> float:
        """Loss per title token of the checked rows, without dropout."""
        model.eval()
        with self.autocast(), known(self.checked.lengths):
            loss = float(self.loss_sum(model, self.checked) / self.num_targets(self.checked))
        model.train()
        return loss

    def result(self, model: Any, tokens: list[float], loss: float) -> dict[str, Any]:
        measured = self.watch.measurements()
        losses = {"loss_before": self.loss_before, "loss_after": self.mean_loss(model)}
        return measured | losses | {"units": tokens, "batch_size": self.settings["batch_size"]}


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    return Titles(settings).measure()


CONTENDERS = dict.fromkeys(("ours", "ours_compiled", "bare", "trainer_best", "trainer", "padded"), measure)
