"""transformers' Trainer as the contenders use it."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarking.watch import Watch

disable_progress_bars()


class Marks(TrainerCallback):
    """Marks the steps for a watch."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.watch.mark()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.watch.mark()


def arguments_of(settings: dict[str, Any], seq2seq: bool = False, **more: Any) -> TrainingArguments:
    """Nothing is reported or saved; with settings["batch_size"] those of a training of settings["max_steps"] steps, or else of
    one epoch."""
    given = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": not torch.cuda.is_available()}
    if "batch_size" in settings:
        given |= {"per_device_train_batch_size": settings["batch_size"], "learning_rate": settings["learning_rate"]}
        given |= {"max_steps": settings["max_steps"]} if "max_steps" in settings else {"num_train_epochs": 1}
    given |= {"output_dir": settings["folder"], "seed": settings["seed"], "bf16": settings["precision"] == "bf16"}
    return (Seq2SeqTrainingArguments if seq2seq else TrainingArguments)(**given | more)


def best_arguments() -> dict[str, Any]:
    """Fused AdamW and rows of similar length together; on a GPU TF32 and workers."""
    cuda = torch.cuda.is_available()
    gpu = {"tf32": True, "dataloader_num_workers": 2} if cuda else {}
    grouped = {"train_sampling_strategy": "group_by_length"}
    return {"optim": "adamw_torch_fused", "dataloader_pin_memory": cuda, **grouped, **gpu}


def make_trainer(
    model: Any, arguments: TrainingArguments, rows: dict[str, list] | Dataset, tokenizer: Any, *callbacks: TrainerCallback
) -> Trainer:
    """`rows` have "input_ids" and "labels"; they are padded to the longest of a batch."""
    rows = rows if isinstance(rows, Dataset) else Dataset.from_dict(rows)
    seq2seq = isinstance(arguments, Seq2SeqTrainingArguments)
    kind, collator = (Seq2SeqTrainer, DataCollatorForSeq2Seq) if seq2seq else (Trainer, DataCollatorWithPadding)
    collate = collator(tokenizer)
    return kind(
        model, arguments, data_collator=collate, train_dataset=rows, processing_class=tokenizer, callbacks=list(callbacks)
    )
