"""Contenders that train one model on the same rows. Each is a method with the contender's name."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from benchmarking import application
from benchmarking.watch import Watch

MAX_GRAD_NORM = 1.0  # the application's default


class TrainingContender:
    """settings: "contender": the method to run; "batch_size", "learning_rate", "max_steps"; "choice":
    settings of the contender that a search tries (`contest`).

    A subclass for each task (`script`: its script in app/) defines `options()`: the application's arguments;
    `plain_model()`: a model that transformers alone computes; `token_rows()`: (columns "input_ids" and
    "labels", tokenizer); `result(model)`: results besides time and memory.
    """

    script: str
    seq2seq = False  # which Trainer

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.choice, self.watch = settings, settings["choice"], Watch(settings)
        self.device, self.cuda = self.watch.device, self.watch.device.type == "cuda"

    @classmethod
    def measure(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return getattr(cls(settings), settings["contender"])()

    def measure_training(self, model: Any, train: Callable[[], Any]) -> dict[str, Any]:
        """Measures `train`(), which trains the model."""
        self.watch.train(model, train)
        return self.watch.measurements() | self.result(model)

    def result(self, model: Any) -> dict[str, Any]:
        return {}

    @cached_property
    def prepared(self) -> tuple[Any, Any]:
        """(the application's task, its rows to train on)."""
        return application.prepare(self.script, self.options())

    def ours(self) -> dict[str, Any]:
        """The application's own command up to the end of training. The choice is arguments of it."""
        return application.train(self.script, self.options() | self.choice, self.measure_training)

    def trainer(self) -> dict[str, Any]:
        """transformers' Trainer."""
        from benchmarking.contenders import trainer  # slow to import

        rows, tokenizer = self.token_rows()
        arguments = trainer.arguments_of(self.settings, self.seq2seq)
        hf_trainer = trainer.make_trainer(self.plain_model(), arguments, rows, tokenizer)
        return self.measure_training(hf_trainer.model, hf_trainer.train)

    @property
    def micro_batch(self) -> int:
        """Rows of a forward pass."""
        return self.settings["batch_size"] // self.choice["accumulation"]

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        learning_rate = self.settings["learning_rate"]
        return torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=self.choice["fused"])
