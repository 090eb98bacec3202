"""Where the time of our step goes, communication between processes, and the operations that the model needs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarking import application
from benchmarking.contenders import classification, titles
from benchmarking.contenders.timing import take_turns

BUCKET = 25 * 2**20  # bytes; what DistributedDataParallel sends at a time
WARM_UP = 2


class Parts:
    """Sums up the seconds of each part of a step, on a GPU until it has done its work."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def record(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.sums[name] += time.perf_counter() - started


def parts(settings: dict[str, Any]) -> dict[str, Any]:
    """Our training (settings["contender"] names the task), with the seconds of its parts."""
    recorded, task = Parts(), settings["contender"]
    application.record_parts(recorded.record)
    measured = {"classification": classification, "titles": titles}[task].measure(settings | {"contender": "ours"})
    seconds = measured["step_seconds"]
    return {"parts": recorded.sums, "seconds": sum(seconds), "steps": len(seconds)}


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


BACKWARD = 2.0


def classification_flops(settings: dict[str, Any]) -> dict[str, Any]:
    """Ours, with the operations of each step: `units`. Those of a row are a * length + b * length^2, through two counts."""
    ours = classification.Classification(settings | {"contender": "ours"})
    measured, model = ours.measure(), ours.plain_model()
    long = settings["max_length"]
    short = min(64, long // 2)
    low, high = (counted(partial(forward, model, length), model) / length for length in (short, long))
    slope = (high - low) / (long - short)
    done = [float((lengths * (low + slope * (lengths - short))).sum()) for lengths in ours.step_lengths]
    return measured | {"units": [(1 + BACKWARD) * operations for operations in done]}


def titles_flops(settings: dict[str, Any]) -> dict[str, Any]:
    """Ours, with the operations of each step as transformers' block-sparse BigBird needs them."""
    ours = titles.Titles(settings | {"contender": "ours"})
    measured, row = ours.measure(), ours.prepared.steps.collate([0])
    model = ours.plain_model()
    operations = counted(partial(ours.loss_sum, model, row), model)
    return measured | {"units": [(1 + BACKWARD) * operations * measured["batch_size"]] * len(measured["step_seconds"])}


def forward(model: Any, length: int) -> None:
    ids = torch.full((1, length), 5)
    model(input_ids=ids, attention_mask=torch.ones_like(ids))


def counted(work: Callable[[], Any], model: torch.nn.Module) -> float:
    model.eval()
    # The counter knows the products of plain attention, but not torch's fused one on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        work()
    return float(counter.get_total_flops())


CONTENDERS = {
    "classification": parts, "titles": parts, "communication": communication,
    "classification_flops": classification_flops, "titles_flops": titles_flops,
}  # fmt: skip
