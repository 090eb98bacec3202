"""transformers' Trainer for the contenders, and its start over a large file (for ours see
`classification`)."""

from typing import Any

import torch
from datasets import Dataset, disable_progress_bars, load_dataset
from transformers import AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.data.data_collator import DataCollatorForSeq2Seq, DataCollatorWithPadding

from benchmarking.contenders.classification import load_model
from benchmarking.data import LABELS
from benchmarking.watch import Watch

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


def make_trainer(
    model: Any, arguments: TrainingArguments, rows: dict[str, list] | Dataset, tokenizer: Any
) -> Trainer:
    """`rows`: with "input_ids" and "labels", padded to the longest row of a batch."""
    rows = (
        rows
        if isinstance(rows, Dataset)
        else Dataset.from_dict(rows | {"length": [len(ids) for ids in rows["input_ids"]]})
    )
    seq2seq = isinstance(arguments, Seq2SeqTrainingArguments)
    kind, collator = (
        (Seq2SeqTrainer, DataCollatorForSeq2Seq) if seq2seq else (Trainer, DataCollatorWithPadding)
    )
    return kind(
        model, arguments, data_collator=collator(tokenizer), train_dataset=rows, processing_class=tokenizer
    )


def start(settings: dict[str, Any]) -> dict[str, Any]:
    """Trainer up to the end of its first step, over tokens that `datasets` computes and caches."""
    watch, tokenizer = Watch(settings), AutoTokenizer.from_pretrained(settings["model"])
    rows = load_dataset("json", data_files=settings["train_file"], split="train")
    inputs = {"tokenizer": tokenizer, "max_length": settings["max_length"]}
    rows = rows.map(encode, batched=True, fn_kwargs=inputs, remove_columns=["text", "labels"])
    trainer = make_trainer(load_model(settings, len(LABELS)), arguments_of(settings), rows, tokenizer)
    watch.train(trainer.model, trainer.train)
    return watch.measurements()


def encode(rows: dict[str, list], tokenizer: Any, max_length: int) -> dict[str, list]:
    ids = tokenizer(rows["text"], truncation=True, max_length=max_length)["input_ids"]
    return {
        "input_ids": ids,
        "labels": [[float(name in labels) for name in LABELS] for labels in rows["labels"]],
    }


CONTENDERS = {"start": start}
