"""transformers' Trainer for the contenders."""

from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.data.data_collator import DataCollatorForSeq2Seq, DataCollatorWithPadding

disable_progress_bars()


def arguments_of(settings: dict[str, Any], seq2seq: bool = False, **more: Any) -> TrainingArguments:
    """Arguments for settings["max_steps"] training steps of settings["batch_size"] rows without reports and
    checkpoints, with the settings of settings["choice"]."""
    cuda, choice = torch.cuda.is_available(), {"accumulation": 1, "fused": True} | settings["choice"]
    gpu = {"tf32": True, "dataloader_num_workers": 2} if cuda else {"dataloader_pin_memory": False}
    return (Seq2SeqTrainingArguments if seq2seq else TrainingArguments)(
        output_dir=settings["folder"], seed=settings["seed"],
        bf16=settings["precision"] == "bf16" and "weights" not in choice,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not cuda,
        max_steps=settings["max_steps"],
        per_device_train_batch_size=settings["batch_size"] // choice["accumulation"],
        gradient_accumulation_steps=choice["accumulation"], learning_rate=settings["learning_rate"],
        optim="adamw_torch_fused" if choice["fused"] else "adamw_torch",
        torch_compile=choice.get("compile", False),
        train_sampling_strategy="group_by_length" if choice.get("grouped") else "random", **gpu, **more,
    )  # fmt: skip


def make_trainer(model: Any, arguments: TrainingArguments, rows: dict[str, list], tokenizer: Any) -> Trainer:
    """`rows`: with "input_ids" and "labels", padded to the longest row of a batch."""
    # Trainer would add the micro-batches' losses instead of averaging them (transformers issue 47688).
    model.accepts_loss_kwargs = False
    data = Dataset.from_dict(rows | {"length": [len(ids) for ids in rows["input_ids"]]})
    kind, collator = Trainer, DataCollatorWithPadding
    if isinstance(arguments, Seq2SeqTrainingArguments):
        kind, collator = Seq2SeqTrainer, DataCollatorForSeq2Seq
    return kind(model, arguments, collator(tokenizer), data, processing_class=tokenizer)
