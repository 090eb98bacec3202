"""transformers' Trainer as the contenders use it, and its start over a large file (ours is in `classification`)."""

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
    """Nothing is reported or saved; with settings["batch_size"] those of a training of settings["max_steps"] steps, or else of
    one epoch."""
    given = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": not torch.cuda.is_available()}
    if "batch_size" in settings:
        given |= {"per_device_train_batch_size": settings["batch_size"], "learning_rate": settings["learning_rate"]}
        given |= {"max_steps": settings["max_steps"]} if "max_steps" in settings else {"num_train_epochs": 1}
    given |= {"output_dir": settings["folder"], "seed": settings["seed"], "bf16": settings["precision"] == "bf16"}
    return (Seq2SeqTrainingArguments if seq2seq else TrainingArguments)(**given | more)


def make_trainer(model: Any, arguments: TrainingArguments, rows: dict[str, list] | Dataset, tokenizer: Any) -> Trainer:
    """`rows` have "input_ids" and "labels"; they are padded to the longest of a batch."""
    rows = rows if isinstance(rows, Dataset) else Dataset.from_dict(rows | {"length": [len(ids) for ids in rows["input_ids"]]})
    seq2seq = isinstance(arguments, Seq2SeqTrainingArguments)
    kind, collator = (Seq2SeqTrainer, DataCollatorForSeq2Seq) if seq2seq else (Trainer, DataCollatorWithPadding)
    return kind(model, arguments, data_collator=collator(tokenizer), train_dataset=rows, processing_class=tokenizer)


def start(settings: dict[str, Any]) -> dict[str, Any]:
    """Trainer until its first step is done, over tokens that `datasets` makes and keeps."""
    watch, tokenizer = Watch(settings), AutoTokenizer.from_pretrained(settings["model"])
    rows = load_dataset("json", data_files=settings["train_file"], split="train")
    given = {"tokenizer": tokenizer, "max_length": settings["max_length"]}
    rows = rows.map(encode, batched=True, fn_kwargs=given, remove_columns=["text", "labels"])
    trained = make_trainer(load_model(settings, len(LABELS)), arguments_of(settings), rows, tokenizer)
    watch.train(trained.model, trained.train)
    return watch.measurements()


def encode(rows: dict[str, list], tokenizer: Any, max_length: int) -> dict[str, list]:
    ids = tokenizer(rows["text"], truncation=True, max_length=max_length)["input_ids"]
    return {"input_ids": ids, "labels": [[float(name in found) for name in LABELS] for found in rows["labels"]]}


CONTENDERS = {"start": start}
