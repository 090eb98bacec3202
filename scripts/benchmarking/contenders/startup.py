"""The start of a command over a large file (ours is in `classification`)."""

from __future__ import annotations

from typing import Any

from benchmarking.contenders.classification import load_model
from benchmarking.data import LABELS
from benchmarking.watch import Watch


def start_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """Trainer until its first step is done, over tokens that `datasets` makes and keeps."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    from benchmarking.contenders import trainer

    watch, tokenizer = Watch(settings), AutoTokenizer.from_pretrained(settings["model"])
    rows = load_dataset("json", data_files=settings["train_file"], split="train")
    given = {"tokenizer": tokenizer, "max_length": settings["max_length"]}
    rows = rows.map(encode, batched=True, fn_kwargs=given, remove_columns=["text", "labels"])
    trained = trainer.make_trainer(load_model(settings, len(LABELS)), trainer.arguments_of(settings), rows, tokenizer)
    watch.train(trained.model, trained.train)
    return watch.measurements()


def encode(rows: dict[str, list], tokenizer: Any, max_length: int) -> dict[str, list]:
    ids = tokenizer(rows["text"], truncation=True, max_length=max_length)["input_ids"]
    return {"input_ids": ids, "labels": [[float(name in found) for name in LABELS] for found in rows["labels"]]}


CONTENDERS = {"trainer": start_trainer}
