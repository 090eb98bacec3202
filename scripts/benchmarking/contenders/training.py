"""Contenders that train one model on the same rows. Each is a method with the contender's name."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any

import torch

from benchmarking import application
from benchmarking.watch import Watch
from samerun.kernels.dropout import dropout_by_row

MAX_GRAD_NORM = 1.0


class TrainingContender:
    """settings: "contender": the method to run; "batch_size", "learning_rate", "max_steps".

    A subclass for each task (`script`: its script in app/) defines `options()`: the application's arguments;
    `plain_model()`: a model that transformers alone computes; `token_rows()`: (columns "input_ids" and
    "labels", tokenizer); `before(model)`: called before the first step; `result(model)`: results besides time
    and memory.
    """

    script: str
    seq2seq = False  # which Trainer

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.watch = settings, Watch(settings)
        self.device, self.cuda = self.watch.device, self.watch.device.type == "cuda"

    @classmethod
    def measure(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return getattr(cls(settings), settings["contender"])()

    def measure_training(self, model: Any, train: Callable[[], Any]) -> dict[str, Any]:
        """Measures `train`(), which trains the model."""
        self.before(model)
        self.watch.train(model, train)
        return self.watch.measurements() | self.result(model)

    def before(self, model: Any) -> None:
        return

    def result(self, model: Any) -> dict[str, Any]:
        return {}

    @cached_property
    def prepared(self) -> tuple[Any, Any]:
        """(the application's task, its training steps)."""
        return application.prepare(self.script, self.options())

    def ours(self) -> dict[str, Any]:
        """The application's own command up to the end of training."""
        return application.train(self.script, self.options(), self.measure_ours)

    def measure_ours(self, train: Callable[[], Any], training: Any) -> dict[str, Any]:
        return self.measure_training(training.model, train)

    def torch_dropout(self) -> dict[str, Any]:
        """The application's own command with torch's dropout."""
        options = self.options() | {"dropout_by": "torch"}
        return application.train(self.script, options, self.measure_ours)

    def bare(self) -> dict[str, Any]:
        """A plain PyTorch loop over the same micro-batches, with the task's model and loss."""
        task, steps = self.prepared
        model = application.build(task).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.settings["learning_rate"], fused=True)
        batches = (steps[number] for number in range(len(steps)))
        return self.measure_training(
            model, partial(self.loop, model, optimizer, batches, len(steps), self.task_losses)
        )

    def task_losses(self, model: Any, batches: list[Any]) -> Iterator[torch.Tensor]:
        task, _ = self.prepared
        batches = [(batch.pin_memory() if self.cuda else batch).to(self.device) for batch in batches]
        targets = sum(task.num_targets(batch) for batch in batches)
        for batch in batches:
            with self.autocast(), dropout_by_row(batch.lengths, batch.places):
                loss = task.loss_sum(model, batch) / targets
            yield loss

    def loop(
        self, model: Any, optimizer: Any, batches: Iterable[Any], steps: int, losses_of: Callable[..., Any]
    ) -> None:
        """A plain training loop. `losses_of`(model, batch): the losses of a step's micro-batches."""
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            for loss in losses_of(model, batch):
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()

    def trainer(self, **more: Any) -> dict[str, Any]:
        """transformers' Trainer with default settings."""
        from benchmarking.contenders import trainer  # slow to import

        rows, tokenizer = self.token_rows()
        arguments = trainer.arguments_of(self.settings, self.seq2seq, **more)
        hf_trainer = trainer.make_trainer(self.plain_model(), arguments, rows, tokenizer)
        return self.measure_training(hf_trainer.model, hf_trainer.train)

    def trainer_best(self) -> dict[str, Any]:
        """Trainer with fused AdamW and batches of similar length; on a GPU also TF32 and workers."""
        gpu = {"tf32": True, "dataloader_num_workers": 2} if self.cuda else {"dataloader_pin_memory": False}
        return self.trainer(optim="adamw_torch_fused", train_sampling_strategy="group_by_length", **gpu)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings["precision"] == "bf16")
