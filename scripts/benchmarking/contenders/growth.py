"""How the cost of our step, of the figures and of reading a file grows."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import classify
import numpy as np
import torch

from benchmarking.memory import PeakMemory
from finetune.arguments.parsing import parse
from finetune.kernels.padding_free.encoders import use_padding_free
from finetune.kernels.padding_free.support import check_padding_free
from finetune.launching import processes
from finetune.launching.launch import describe_launch
from finetune.plan import make_plan
from finetune.task import Batch
from finetune.training.batches import TrainSteps
from finetune.training.optimizer import build_optimizer
from finetune.training.step import train_step
from models.multilabel import MultiLabelTask

WARM_UP = 1
TEXT = "sort the values of a matrix and return its eigenvalues as vectors in one array or list numbers"


def steps(settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of an optimizer step over rows of one length, wall and CPU, against length, rows of the batch and labels.

    All points take turns. Each is measured as the application cuts it: on a CPU forward passes have at most 2048 tokens.
    """
    points = list(asked(settings))
    works = [work_of(settings, *point[2:]) for point in points]
    seconds: list[list[tuple[float, float]]] = [[] for _ in points]
    memory: list[float] = [0.0] * len(points)
    for turn in range(settings["repeats"] + WARM_UP):
        order = range(len(points)) if turn % 2 else range(len(points) - 1, -1, -1)
        for place in order:
            *took, peak = works[place]()
            if turn >= WARM_UP:
                seconds[place].append(tuple(took))
            memory[place] = max(memory[place], peak)
    found = []
    for (against, x, *_), times, peak in zip(points, seconds, memory, strict=True):
        wall, cpu = ([one[place] for one in times] for place in (0, 1))
        median = {"seconds": statistics.median(wall), "cpu_seconds": statistics.median(cpu), "at_best": min(wall)}
        # On a CPU what earlier steps freed is still resident, so that little shows.
        found.append({"against": against, "x": x, **median, "memory_mb": peak if torch.cuda.is_available() else None})
    return {"measured": found}


def asked(settings: dict[str, Any]) -> Iterator[tuple[str, int, int, int, int]]:
    """(what grows, how far, tokens of a row, rows of the batch, labels) of every point."""
    length, rows, labels = settings["length"], settings["batch_size"], settings["labels"]
    for some in settings["lengths"]:
        yield "tokens of a row", some, some, rows, labels
    for some in settings["batches"]:
        yield "rows of a batch", some, length, some, labels
    for some in settings["label_counts"]:
        yield "labels", some, length, rows, some


def work_of(settings: dict[str, Any], length: int, rows: int, labels: int) -> Callable[[], tuple[float, float, float]]:
    """A function that makes one step and returns (its seconds, its CPU seconds, the peak of memory above what was held before,
    in MiB)."""
    from transformers import BertConfig, BertForSequenceClassification

    given = {"global_batch_size": rows, "output_dir": settings["folder"], "mixed_precision": settings["precision"]}
    argv = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    arguments = parse(classify.Arguments, argv=[*argv, "--report_to", "none", "--max_steps", "1", "--num_train_epochs", "1"])
    launch = describe_launch(arguments)
    plan = make_plan(arguments, rows, 1, launch.micro_batches_by_tokens)
    run = processes.start(launch, plan.batch)
    hidden = settings["hidden"]
    config = BertConfig(
        vocab_size=8192, hidden_size=hidden, num_hidden_layers=settings["layers"], num_attention_heads=max(1, hidden // 64),
        intermediate_size=4 * hidden, num_labels=labels, problem_type="multi_label_classification",
        max_position_embeddings=max(512, length),
    )  # fmt: skip
    torch.manual_seed(settings["seed"])
    model = BertForSequenceClassification(config)
    if check_padding_free("auto", kernels="auto", config=config, on_gpu=not launch.use_cpu, padding_side="right"):
        use_padding_free(model)
    model, optimizer = run.accelerator.prepare(model, build_optimizer(arguments, model, 1e-5))
    task = MultiLabelTask("loss", labels, None, 0.0)
    generator = np.random.default_rng(settings["seed"])

    def collate(chosen: np.ndarray) -> Batch:
        ids = torch.from_numpy(generator.integers(5, 8192, (len(chosen), length)))
        targets = torch.from_numpy(generator.random((len(chosen), labels)) < 2 / labels).float()
        lengths = (length,) * len(chosen)
        return Batch(torch.from_numpy(chosen), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, targets, lengths)

    source = TrainSteps(collate, np.full(rows, length), plan, 0, settings["seed"], True)

    def one() -> tuple[float, float, float]:
        memory = PeakMemory(run.device)
        batches = source[0]
        _settle(run.device)
        started, cpu = time.perf_counter(), time.process_time()
        train_step(run, model, optimizer, task, batches, 1.0)
        _settle(run.device)
        took = time.perf_counter() - started, time.process_time() - cpu
        return *took, memory.figures()["memory_mb"]

    model.train()
    return one


def scores(settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of all figures of an evaluation, against rows and labels."""
    found = []
    generator = np.random.default_rng(settings["seed"])
    for rows, labels in settings["score_sizes"]:
        logits = generator.normal(size=(rows, labels)).astype(np.float32)
        targets = (generator.random((rows, labels)) < 0.02).astype(np.uint8)
        records = [{"row": row, "logits": logits[row], "labels": targets[row]} for row in range(rows)]
        task = MultiLabelTask("f1_macro", labels, None, 0.0)
        times = []
        for _ in range(settings["repeats"]):
            started = time.perf_counter()
            task.score(records)
            times.append(time.perf_counter() - started)
        found.append({"rows": rows, "labels": labels, "seconds": statistics.median(times), "at_best": min(times)})
    return {"measured": found}


def reading(settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds and memory of what comes before the training - reading, checking, tokenizing - against the rows of a file: the
    first time, and again, when the tokens are kept."""
    generator = np.random.default_rng(settings["seed"])
    found, held = [], PeakMemory(torch.device("cpu")).before
    for rows in settings["row_counts"]:
        path = Path(settings["folder"]).with_suffix(f".{rows}.jsonl")
        write_rows(path, rows, generator)
        given = {
            "model_name_or_path": settings["model"], "train_file": path, "max_length": 64, "output_dir": settings["folder"],
            "do_train": True, "do_eval": False, "report_to": "none",
        }  # fmt: skip
        arguments = parse(
            classify.Arguments, argv=[word for name, value in given.items() for word in (f"--{name}", str(value))]
        )
        times, memory = [], PeakMemory(torch.device("cpu"))
        for _ in range(2):
            started = time.perf_counter()
            classify.load_data(arguments, True, False, False)
            times.append(time.perf_counter() - started)
        peak = memory.figures()["peak_memory_mb"] - held
        size = path.stat().st_size / 2**20
        found.append({"rows": rows, "file_mb": size, "first": times[0], "again": times[1], "memory_mb": peak})
        path.unlink()
    return {"measured": found}


def write_rows(path: Path, rows: int, generator: np.random.Generator) -> None:
    """Short texts, no two alike, with one to three of twenty labels."""
    vocabulary = TEXT.split()
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            words = [vocabulary[place] for place in generator.integers(0, len(vocabulary), generator.integers(6, 18))]
            labels = sorted({f"label {number}" for number in generator.integers(0, 20, generator.integers(1, 4))})
            file.write(json.dumps({"text": f"{row} {' '.join(words)}", "labels": labels}) + "\n")


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


CONTENDERS = {"steps": steps, "scores": scores, "reading": reading}
