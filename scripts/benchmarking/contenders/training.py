"""Ways of training one model on the same rows: ours, a bare loop, a loop that pads to max_length, transformers' Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch

from benchmarking import application
from benchmarking.watch import Stopped, Watch, WatchedSteps
from finetune.kernels.row_lengths import row_lengths

MAX_GRAD_NORM = 1.0


class TrainingContender:
    """A contender; settings["contender"] says which way it trains, "batch_size", "learning_rate" and "max_steps" how.

    A subclass for each task, the script `script` of app/, says what differs between tasks: `options()` for the application;
    `plain_model()`, computed by transformers alone; `token_rows()`, the columns "input_ids", "labels" and "length", and the
    tokenizer; `pad_labels(labels)`; `before(model)`, called before the first step; `result(model, tokens, loss)`, what is
    handed over, `tokens` being those of each step.
    """

    script: str
    seq2seq = False  # which Trainer

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.watch = settings, Watch(settings)
        self.device, self.cuda = self.watch.device, self.watch.device.type == "cuda"

    def measure(self) -> dict[str, Any]:
        name = self.settings["contender"]
        if name.startswith("ours"):
            return application.train(self.script, self.options(), self.train_ours)
        if name.startswith("trainer"):
            return self.train_with_trainer()
        return {"bare": self.train_bare, "padded": self.train_padded}[name]()

    @cached_property
    def prepared(self) -> application.Prepared:
        """What the application would train on."""
        return application.prepare(self.script, self.options())

    @cached_property
    def task(self) -> Any:
        return self.prepared.task

    @cached_property
    def steps(self) -> Any:
        return self.prepared.steps

    def train_ours(self, training: Any, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The application's own command, watched from where it takes its batches and left when the training is done."""
        self.task, self.steps, loss = training.task, training.steps, math.nan
        self.before(training.model)
        training.steps = WatchedSteps(self.steps, self.watch)
        with suppress(Stopped):
            loss = train()["train_loss"]
            self.watch.mark()
        return self.result_of_steps(training.model, loss)

    def train_bare(self) -> dict[str, Any]:
        """The same batches in the same order and the same passes, the task's model and loss, and nothing but PyTorch around
        them."""
        steps, learning_rate, losses = self.steps, self.settings["learning_rate"], []
        model = self.prepared.model().to(self.device)
        self.before(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
        with suppress(Stopped):
            model.train()
            self.watch.mark()
            for step in range(len(steps)):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * (1 - step / len(steps))
                losses.append(self.bare_backward(model, steps[step]))
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
                self.watch.mark()
        return self.result_of_steps(model, float(torch.stack(losses).mean()))

    def bare_backward(self, model: Any, batches: list[Any]) -> torch.Tensor:
        """The gradients of a step; returns its loss."""
        batches = [(batch.pin_memory() if self.cuda else batch).to(self.device) for batch in batches]
        targets, total = sum(self.task.num_targets(batch) for batch in batches), torch.zeros((), device=self.device)
        for batch in batches:
            with self.autocast(), row_lengths(batch.lengths):
                loss = self.task.loss_sum(model, batch) / targets
            loss.backward()
            total += loss.detach()
        return total

    def train_padded(self) -> dict[str, Any]:
        """The loop of many hand-written scripts: every row padded to max_length, AdamW as it comes, the loss of every step
        read."""
        columns, tokenizer = self.token_rows()
        ids = pad(columns["input_ids"], self.settings["max_length"], tokenizer.pad_token_id)
        rows = torch.utils.data.TensorDataset(ids, (ids != tokenizer.pad_token_id).long(), self.pad_labels(columns["labels"]))
        model = self.plain_model().to(self.device)
        torch.manual_seed(self.settings["seed"])
        loader = torch.utils.data.DataLoader(rows, self.settings["batch_size"], shuffle=True, pin_memory=self.cuda)
        self.before(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.settings["learning_rate"])
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(loader))
        tokens, losses = [], []
        with suppress(Stopped):
            model.train()
            self.watch.mark()
            for ids, mask, labels in loader:
                tokens.append(int(mask.sum()))
                ids, mask, labels = (tensor.to(self.device) for tensor in (ids, mask, labels))
                with self.autocast():
                    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
                self.watch.mark()
        return self.result(model, tokens, float(np.mean(losses)))

    def train_with_trainer(self) -> dict[str, Any]:
        """transformers' Trainer: as it comes, or (trainer_best) with what suits the case best."""
        from benchmarking.contenders import trainer  # imports much that other contenders must not wait for

        rows, tokenizer = self.token_rows()
        model, loss = self.plain_model().to(self.device), math.nan
        best = {} if self.settings["contender"] == "trainer" else trainer.best_arguments()
        arguments = trainer.arguments_of(self.settings, self.seq2seq, **best)
        trained = trainer.make_trainer(model, arguments, rows, tokenizer, trainer.Marks(self.watch))
        self.before(model)
        with suppress(Stopped):
            loss = trained.train().training_loss
        each = sum(rows["length"]) / math.ceil(len(rows["length"]) / self.settings["batch_size"])
        return self.result(trained.model, [each] * len(self.watch.cpu_seconds), loss)

    def result_of_steps(self, model: Any, loss: float) -> dict[str, Any]:
        """`result` of a training over our batches."""
        return self.result(model, [self.steps.tokens(step)[0] for step in range(len(self.watch.cpu_seconds))], loss)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings["precision"] == "bf16")


def pad(rows: list[list[int]], width: int, value: int) -> torch.Tensor:
    """(rows, width)"""
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])
