"""How long the processes of a launch wait for each other's gradients."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import distributed

from benchmarking import application
from benchmarking.contenders import classification
from benchmarking.contenders.timing import take_turns

BUCKET = 25 * 2**20  # bytes; what DistributedDataParallel sends at a time
WARM_UP = 2


class Exchange:
    """Steps with DDP's exchange of gradients, steps without it, and the exchange alone, in each process of a launch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.step = application.EngineStep(classification.options(settings))
        self.model, self.run = self.step.model, self.step.run
        self.numbers = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        self.buckets = list(torch.zeros(self.numbers, device=self.run.device).split(BUCKET // 4))

    def with_exchange(self, turn: int) -> None:
        self.step.update(self.step.steps[turn])

    def without(self, turn: int) -> None:
        with self.model.no_sync():
            self.with_exchange(turn)

    def alone(self, _turn: int) -> None:
        for bucket in self.buckets:
            distributed.all_reduce(bucket)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """The three take turns; each number is the median of the slowest process's seconds."""
    exchange = Exchange(settings)
    run, ways = exchange.run, {"step": exchange.with_exchange, "without": exchange.without, "exchange": exchange.alone}
    turns = min(settings["steps"], len(exchange.step.steps) - WARM_UP)
    samples = take_turns(ways, run.device, turns, WARM_UP, before=lambda *_: distributed.barrier())
    slowest = torch.tensor([[sample.seconds for sample in each] for each in samples.values()], device=run.device)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    medians = {name: statistics.median(row.tolist()) for name, row in zip(ways, slowest, strict=True)}
    run.wait()
    launch, gradient_mb = run.launch, 4 * exchange.numbers / 2**20
    return {"processes": launch.world_size, "backend": launch.backend, "gradient_mb": gradient_mb, **medians}


CONTENDERS = {"ours": measure}
