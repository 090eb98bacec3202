"""Where the time of our step goes: its parts within one process, and communication between two or more."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from benchmarking import application
from benchmarking.contenders import classification, titles
from benchmarking.contenders.timing import take_turns

BUCKET = 25 * 2**20  # bytes; what DistributedDataParallel sends at a time
WARM_UP = 2


class Parts:
    """Sums up the seconds of each part of a step, on a GPU those of the device."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.sums: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def record(self, name: str) -> Iterator[None]:
        if not self.on_gpu or name == "data":  # batches are made by the host
            started = time.perf_counter()
            yield
            self.sums[name] += time.perf_counter() - started
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((name, start, end))

    def read(self) -> dict[str, float]:
        if self.on_gpu:
            torch.cuda.synchronize()
        for name, start, end in self._events:
            self.sums[name] += start.elapsed_time(end) / 1000
        return dict(self.sums)


def parts(settings: dict[str, Any]) -> dict[str, Any]:
    """Our training (settings["contender"] names the task), with the seconds of its parts."""
    recorded, task = Parts(), settings["contender"]
    application.record_parts(recorded.record)
    measured = {"classification": classification, "titles": titles}[task].measure(settings | {"contender": "ours"})
    seconds = measured["step_seconds"]
    return {"parts": recorded.read(), "seconds": sum(seconds), "steps": len(seconds)}


class Exchange:
    """Steps with DDP's exchange of gradients, steps without it, and the exchange alone, in each process of a launch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.step = application.EngineStep(classification.options(settings))
        self.model, self.run = self.step.model, self.step.run
        self.numbers = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        self.buckets = list(torch.zeros(self.numbers, device=self.run.device).split(BUCKET // 4))

    def with_exchange(self, turn: int) -> None:
        self.step(self.step.steps[turn])

    def without(self, turn: int) -> None:
        with self.model.no_sync():
            self.with_exchange(turn)

    def alone(self, _turn: int) -> None:
        for bucket in self.buckets:
            distributed.all_reduce(bucket)


def communication(settings: dict[str, Any]) -> dict[str, Any]:
    """The three take turns; each number is the median of the slowest process's seconds."""
    exchange = Exchange(settings)
    run, ways = exchange.run, {"step": exchange.with_exchange, "without": exchange.without, "exchange": exchange.alone}
    turns = min(settings["steps"], len(exchange.step.steps) - WARM_UP)
    samples = take_turns(ways, run.device, turns, WARM_UP, before=lambda *_: distributed.barrier())
    slowest = torch.tensor([[sample.seconds for sample in each] for each in samples.values()], device=run.device)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    medians = {name: statistics.median(row.tolist()) for name, row in zip(ways, slowest, strict=True)}
    run.wait()
    launch = exchange.step.launch
    return {
        "processes": launch.world_size, "backend": launch.backend, "gradient_mb": 4 * exchange.numbers / 2**20, **medians,
    }  # fmt: skip


CONTENDERS = {"classification": parts, "titles": parts, "communication": communication}
