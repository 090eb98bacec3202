"""The start of a command over a large file (ours is in `classification`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarking.contenders.classification import load_model
from benchmarking.data import write_rows
from benchmarking.watch import Watch

LABELS = [f"label {number}" for number in range(20)]
SENTENCE = "sort the values of a matrix and return its eigenvalues as vectors in one array or list numbers"
WORDS = SENTENCE.split()


def write_file(settings: dict[str, Any]) -> dict[str, Any]:
    path = Path(settings["train_file"])
    write_rows(path, short_rows(settings["rows"], settings["seed"]))
    return {"mb": path.stat().st_size / 2**20}


def short_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Short texts, no two alike, with one to three of twenty labels."""
    drawn = np.random.default_rng(seed)
    for row in range(count):
        words = [WORDS[place] for place in drawn.integers(0, len(WORDS), drawn.integers(6, 18))]
        labels = sorted({LABELS[place] for place in drawn.integers(0, len(LABELS), drawn.integers(1, 4))})
        yield {"text": f"{row} {' '.join(words)}", "labels": labels}


def start_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """Trainer until its first step is done, over tokens that `datasets` makes and keeps."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    from benchmarking.contenders import trainer

    watch, tokenizer = Watch(settings), AutoTokenizer.from_pretrained(settings["model"])
    rows = load_dataset("json", data_files=settings["train_file"], split="train")
    given = {"tokenizer": tokenizer, "max_length": settings["max_length"]}
    rows = rows.map(encode, batched=True, fn_kwargs=given, remove_columns=["text", "labels"])
    arguments = trainer.arguments_of(settings)
    trainer.make_trainer(load_model(settings, len(LABELS)), arguments, rows, tokenizer, trainer.Marks(watch)).train()
    return watch.measurements()


def encode(rows: dict[str, list], tokenizer: Any, max_length: int) -> dict[str, list]:
    ids = tokenizer(rows["text"], truncation=True, max_length=max_length)["input_ids"]
    return {"input_ids": ids, "labels": [[float(name in found) for name in LABELS] for found in rows["labels"]]}


CONTENDERS = {"file": write_file, "trainer": start_trainer}
