"""How the cost of our step, of an evaluation's metrics and of reading a file grows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarking import application
from benchmarking.contenders.classification import VOCABULARY, bert_config
from benchmarking.contenders.timing import summary, take_turns, timed
from benchmarking.contenders.waits import short_rows
from benchmarking.data import write_rows
from benchmarking.watch import PeakMemory

WARM_UP = 1
CPU = torch.device("cpu")


def steps(settings: dict[str, Any]) -> dict[str, Any]:
    """An optimizer step over rows of one length, against length, rows of the batch and labels. All points take turns.

    Each is measured as the application cuts it: on a CPU forward passes have at most 2048 tokens.
    """
    works = {point: work_of(settings, *point[2:]) for point in points(settings)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    samples = take_turns(works, device, settings["repeats"], WARM_UP)
    return {"measured": [{"against": against, "x": x} | summary(each) for (against, x, *_), each in samples.items()]}


def points(settings: dict[str, Any]) -> Iterator[tuple[str, int, int, int, int]]:
    """(what grows, how far, tokens of a row, rows of the batch, labels)."""
    length, rows, labels = settings["length"], settings["batch_size"], settings["labels"]
    for some in settings["lengths"]:
        yield "tokens of a row", some, some, rows, labels
    for some in settings["batches"]:
        yield "rows of a batch", some, length, some, labels
    for some in settings["label_counts"]:
        yield "labels", some, length, rows, some


def work_of(settings: dict[str, Any], length: int, rows: int, labels: int) -> Any:
    """One step over a file of such rows, with two labels each."""
    from transformers import BertTokenizer

    folder = Path(f"{settings['folder']}_{length}_{rows}_{labels}")
    words = [*("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), *(f"word{number}" for number in range(VOCABULARY - 5))]
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    bert_config(settings | {"max_length": length}, VOCABULARY).save_pretrained(folder)
    names = [f"label {number}" for number in range(labels)]
    (folder / "labels.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    drawn = np.random.default_rng(settings["seed"])
    texts = (" ".join(drawn.choice(words[5:], length - 2)) for _ in range(rows))
    write_rows(folder / "rows.jsonl", [{"text": text, "labels": list(drawn.choice(names, 2, False))} for text in texts])
    step = application.EngineStep(
        application.run_options(settings) | {
            "config_name": folder, "tokenizer_name": folder, "from_scratch": True, "train_file": folder / "rows.jsonl",
            "label_file": folder / "labels.txt", "max_length": length, "global_batch_size": rows, "max_steps": 1,
            "head_bias": "zero",
        }
    )  # fmt: skip
    batches = step.steps[0]
    return lambda _: step.update(batches)


def metrics(settings: dict[str, Any]) -> dict[str, Any]:
    """All metrics of an evaluation, against rows and labels."""
    found = []
    drawn = np.random.default_rng(settings["seed"])
    for rows, labels in settings["score_sizes"]:
        logits = drawn.normal(size=(rows, labels)).astype(np.float32)
        targets = (drawn.random((rows, labels)) < 0.02).astype(np.uint8)
        work = application.multilabel_metrics(logits, targets)
        samples = [timed(work, CPU) for _ in range(settings["repeats"])]
        found.append({"rows": rows, "labels": labels} | summary(samples))
    return {"measured": found}


def reading(settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds and memory of what comes before the training - reading, checking, tokenizing - against the rows of a file: the
    first time, and again, when the tokens are kept."""
    found, held = [], PeakMemory(CPU).before
    for rows in settings["row_counts"]:
        path = Path(f"{settings['folder']}_{rows}.jsonl")
        write_rows(path, short_rows(rows, settings["seed"]))
        options = application.run_options(settings) | {
            "model_name_or_path": settings["model"], "train_file": path, "max_length": 64,
        }  # fmt: skip
        memory, work = PeakMemory(CPU), partial(application.load, "classify", options)
        first, again = (timed(work, CPU).seconds for _ in range(2))
        peak = memory.measurements()["peak_memory_mb"] - held
        size = path.stat().st_size / 2**20
        found.append({"rows": rows, "file_mb": size, "first": first, "again": again, "memory_mb": peak})
        path.unlink()
    return {"measured": found}


CONTENDERS = {"steps": steps, "metrics": metrics, "reading": reading}
