"""Profiles training steps: a trace, the time of each part of a step, and the most expensive operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
from torch.profiler import record_function

TRACE = Path("profile") / "trace.json"
PARTS = ("data", "forward", "backward", "optimizer")  # arguments of `part`, in the order of a step
SKIPPED = 3  # steps that fill caches and compile; the profiler warms up in the last one
SHOWN = 10  # operations

part = record_function


def profiled(
    items: Iterable, accelerator: Accelerator, steps: int | None, output_dir: Path, say: Callable[[str], None]
) -> Iterator:
    """Yields `items`, one per training step, and profiles `steps` steps after the first few; None: no steps.

    Writes a trace for chrome://tracing or Perfetto to `output_dir`/profile. Prints the most expensive
    operations, by time of the GPU or, on a CPU, of the training thread.
    """
    if steps is None:
        yield from _fetch(items)
        return
    device = accelerator.device.type
    settings = ProfileKwargs(
        activities=["cpu", "cuda"] if device == "cuda" else ["cpu"],
        schedule_option={"skip_first": SKIPPED - 1, "wait": 0, "warmup": 1, "active": steps, "repeat": 1},
        on_trace_ready=partial(_report, device=device, path=output_dir / TRACE, say=say),
    )
    with accelerator.profile(settings) as profiler:
        for item in _fetch(items):
            yield item
            profiler.step()
    if profiler.step_num <= SKIPPED:
        say(f"profile        nothing was recorded: it needs more than {SKIPPED} steps")


def _fetch(items: Iterable) -> Iterator:
    iterator = iter(items)
    while True:
        with part("data"):
            item = next(iterator, None)
        if item is None:
            return
        yield item


def _report(profiler: Any, device: str, path: Path, say: Callable[[str], None]) -> None:
    recorded = profiler.step_num - SKIPPED
    if recorded < 1:
        return
    path.parent.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(path))
    for line in describe(profiler.key_averages(), device):
        say(line)
    say(f"profile        {recorded} step(s) are in {path}")


def describe(averages: Any, device: str) -> list[str]:
    """Lines about the parts of a step and the most expensive operations. `averages`:
    `profiler.key_averages()`."""
    total = "cpu_time_total" if device == "cpu" else "device_time_total"
    times = {event.key: getattr(event, total) for event in averages}
    parts = {name: times[name] for name in PARTS if name in times}
    whole = sum(parts.values())
    lines = (
        ["profile        " + ", ".join(f"{name} {time / whole:.1%}" for name, time in parts.items())]
        if whole
        else []
    )
    table = averages.table(sort_by=f"self_{total}", row_limit=SHOWN, max_name_column_width=60)
    return [*lines, *table.splitlines()]
