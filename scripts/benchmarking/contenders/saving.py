"""How long a step is held by a checkpoint of model and optimizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarking import application
from benchmarking.contenders.classification import Classification, options


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
    arguments, callback = trainer.training_arguments(settings, **saves), trainer.SaveTimes()
    trained = trainer.make_trainer(contender.plain_model(), arguments, rows, tokenizer, callback)
    started = time.perf_counter()
    trained.train()
    return {"holds": callback.seconds, "train_seconds": time.perf_counter() - started, "mb": checkpoint_mb(settings)}


def checkpoint_mb(settings: dict[str, Any]) -> float:
    """MiB of a checkpoint."""
    folders = [path for name in ("step_*", "checkpoint-*") for path in Path(settings["folder"]).rglob(name) if path.is_dir()]
    return statistics.median(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) for folder in folders) / 2**20


CONTENDERS = {"ours": save_ours, "trainer": save_with_trainer}
