"""What a training waits for: the start of a command over a large file (ours is in `classification`), and checkpoints."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarking import application
from benchmarking.contenders.classification import Classification, load_model, options
from benchmarking.data import write_rows
from benchmarking.watch import Watch

LABELS = [f"label {number}" for number in range(20)]
WORDS = (
    *(
        "sort",
        "the",
        "values",
        "of",
        "a",
        "matrix",
        "and",
        "return",
        "its",
        "eigenvalues",
        "as",
        "vectors",
        "in",
        "one",
        "array",
    ),
    *("or", "list", "numbers"),
)


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


def save_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """app/classify.py with --save_steps. What a save holds the step for; the writing goes on beside the next steps."""
    holds: list[float] = []
    application.record_saves(holds)
    seconds = application.train("classify", options(settings) | {"save_steps": settings["save_every"]}, train_seconds)
    return {"holds": holds, "train_seconds": seconds, "mb": checkpoint_mb(settings)}


def train_seconds(_training: Any, train: Callable[[], Any]) -> float:
    started = time.perf_counter()
    train()
    return time.perf_counter() - started


def save_with_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """Trainer with save_strategy steps, from the end of a step to the end of its save."""
    from benchmarking.contenders import trainer

    contender = Classification(settings)
    rows, tokenizer = contender.token_rows()
    saves = {"save_strategy": "steps", "save_steps": settings["save_every"], "save_total_limit": 2}
    arguments, callback = trainer.arguments_of(settings, **saves), trainer.SaveTimes()
    trained = trainer.make_trainer(contender.plain_model(), arguments, rows, tokenizer, callback)
    started = time.perf_counter()
    trained.train()
    return {"holds": callback.seconds, "train_seconds": time.perf_counter() - started, "mb": checkpoint_mb(settings)}


def checkpoint_mb(settings: dict[str, Any]) -> float:
    """MiB of a checkpoint."""
    folders = [path for name in ("step_*", "checkpoint-*") for path in Path(settings["folder"]).rglob(name) if path.is_dir()]
    return statistics.median(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) for folder in folders) / 2**20


CONTENDERS = {"file": write_file, "start_trainer": start_trainer, "save_ours": save_ours, "save_trainer": save_with_trainer}
