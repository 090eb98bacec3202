"""Where the time of a few steps goes: a trace by torch's profiler, its costliest operations, the parts of a step. Level 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

TRACE = Path("profile") / "trace.json"
PARTS = ("data", "forward", "backward", "optimizer")  # what `part` is used for, in the order of a step
BEFORE = 3  # steps that fill caches and compile, of which the last warms the profiler up
SHOWN = 10

part = record_function


def profiled(
    items: Iterable, steps: int | None, output_dir: Path, device: torch.device, say: Callable[[str], None]
) -> Iterator:
    """Goes through `items`, one of which makes a step, and watches `steps` of them after the first few; None: none of them.

    Leaves a trace for chrome://tracing or Perfetto in `output_dir`/profile and says which operations cost most. On a GPU that
    is time of the GPU, on a CPU of the thread that trains.
    """
    source = _fetched(items)
    if steps is None:
        yield from source
        return
    seen = 0

    def finish(profiler: Any) -> None:
        if seen <= BEFORE:
            return
        path = output_dir / TRACE
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
        for line in describe(profiler.key_averages(), device):
            say(line)
        say(f"profile        {min(steps, seen - BEFORE)} step(s) are in {path}")

    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    plan = schedule(skip_first=BEFORE - 1, wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU, *on_gpu], schedule=plan, on_trace_ready=finish) as profiler:
        for item in source:
            seen += 1
            yield item
            profiler.step()
    if seen <= BEFORE:
        say(f"profile        nothing was recorded: it needs more than {BEFORE} steps")


def describe(averages: Any, device: torch.device) -> list[str]:
    """The parts of a step and the costliest operations, from a profiler's averages."""
    key = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    whole = key.removeprefix("self_")
    named = {event.key: event for event in averages}
    parts = {name: getattr(named[name], whole) for name in PARTS if name in named}
    total = sum(parts.values())
    lines = []
    if total:
        lines.append("profile        " + ", ".join(f"{name} {time / total:.1%}" for name, time in parts.items()))
    operations = [event for event in averages if event.key not in PARTS and not event.key.startswith("ProfilerStep")]
    own = sum(getattr(event, key) for event in operations)
    operations.sort(key=lambda event: getattr(event, key), reverse=True)
    for event in operations[:SHOWN]:
        time = getattr(event, key)
        share = time / own if own else 0.0
        lines.append(f"{'':<15}{event.key[:60]:<60} {event.count:>7} x {time / 1000:>10.1f} ms {share:>6.1%}")
    return lines


def _fetched(items: Iterable) -> Iterator:
    iterator = iter(items)
    while True:
        with part("data"):
            item = next(iterator, None)
        if item is None:
            return
        yield item
