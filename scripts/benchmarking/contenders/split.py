"""Where the time of our step goes: its parts within one process, and communication between two or more."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarking.contenders import classification, titles

BUCKET = 25 * 2**20  # bytes; what DistributedDataParallel sends at a time
WARM_UP = 2


class Parts:
    """Stands in for `profiling.part`: sums up the seconds of each part, on a GPU those of the device."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.sums: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
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
        self._events = []
        return dict(self.sums)


def watched(train: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The contender `train`, with the seconds of its parts."""

    def contender(settings: dict[str, Any]) -> dict[str, Any]:
        from finetune.reports import profiling
        from finetune.training import step

        parts = Parts(torch.cuda.is_available())
        step.part = profiling.part = parts
        figures = train(settings)
        return {"parts": parts.read(), "seconds": sum(figures["step_seconds"]), "steps": len(figures["step_seconds"])}

    return contender


def communication(settings: dict[str, Any]) -> dict[str, Any]:
    """In every process of a launch: steps with DDP's exchange of gradients, steps without it, and the exchange alone.

    The three take turns; each figure is the median of the slowest process's seconds.
    """
    import classify
    import numpy as np
    from torch import distributed

    from finetune.arguments.parsing import parse
    from finetune.launching import processes
    from finetune.launching.launch import describe_launch
    from finetune.plan import make_plan
    from finetune.training.optimizer import build_optimizer
    from finetune.training.step import train_step
    from models.multilabel import MultiLabelTask

    arguments = parse(classify.Arguments, argv=classification.our_arguments(settings | {"contender": "ours"}))
    launch = describe_launch(arguments)
    data = classify.load_data(arguments, True, False, False)
    plan = make_plan(arguments, len(data.train.texts), launch.world_size, launch.micro_batches_by_tokens)
    run = processes.start(launch, plan.batch)
    task = MultiLabelTask("loss", len(data.labels), None, 0.0)
    packed = classify.leaves_padding_out(arguments, data, launch)
    model = classify.build_model(arguments, data, task, packed)
    model, optimizer = run.accelerator.prepare(model, build_optimizer(arguments, model, 1e-5))
    model.train()
    steps = classify.train_steps(arguments, data, plan, launch.rank, packed)
    size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    buckets = list(torch.zeros(size, device=run.device).split(BUCKET // 4))

    def step(number: int) -> None:
        train_step(run, model, optimizer, task, steps[number], 1.0)

    def alone(number: int) -> None:
        with model.no_sync():
            step(number)

    def exchange(_: int) -> None:
        for bucket in buckets:
            distributed.all_reduce(bucket)

    times: dict[str, list[float]] = {"step": [], "without": [], "exchange": []}
    ways = {"step": step, "without": alone, "exchange": exchange}
    for turn in range(min(settings["steps"] + WARM_UP, len(steps))):
        for name in list(ways) if turn % 2 else list(ways)[::-1]:
            seconds = timed(run, lambda name=name, turn=turn: ways[name](turn))
            if turn >= WARM_UP:
                times[name].append(seconds)
    slowest = torch.from_numpy(np.array([times[name] for name in ways], dtype=np.float64)).to(run.device)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    medians = {name: statistics.median(row.tolist()) for name, row in zip(ways, slowest, strict=True)}
    run.wait()
    return {"processes": launch.world_size, "backend": launch.backend, "gradient_mb": 4 * size / 2**20, **medians}


def timed(run: Any, work: Callable[[], None]) -> float:
    torch.distributed.barrier()
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


CONTENDERS = {
    "classification": watched(classification.train_ours),
    "titles": watched(titles.train_ours),
    "communication": communication,
}
