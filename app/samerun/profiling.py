"""Step times, memory use, and the profile of training steps (--profile)."""

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
from torch.autograd import DeviceType
from torch.profiler import record_function

TRACE = Path("profile") / "trace.json"
PARTS = ("data", "forward", "backward", "replay", "optimizer")  # of a step, in this order
SKIPPED = 3  # steps that fill caches and compile; the profiler warms up in the last one
AUTOGRAD = "autograd::engine::evaluate_function"


class StepClock:
    """Seconds per step. Marks on a GPU are CUDA events, whose times are read when the host waits for the
    device anyway."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.seconds: list[float] = []
        self._marks: list = []

    def mark(self) -> None:
        """Records the time: after every step, before the first one and after a pause."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def read(self) -> float:
        """Appends the steps since the last call to `seconds` and returns their sum."""
        if self.on_gpu and self._marks:
            self._marks[-1].synchronize()
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        new = [start.elapsed_time(end) / 1000 if self.on_gpu else end - start for start, end in pairs]
        self.seconds += new
        self._marks = self._marks[-1:]
        return sum(new)

    def pause(self) -> None:
        """Forgets the last mark: the time until the next one is no step."""
        self._marks = []


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process in MiB: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def memory_mb(device: torch.device) -> float:
    """Current memory of this process in MiB: reserved by torch's allocator on a GPU (without a
    synchronisation), resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) / 2**20
    return psutil.Process().memory_info().rss / 2**20


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
        with record_function("data"):
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
    on_host = [event for event in averages if event.device_type == DeviceType.CPU]
    times = {event.key: getattr(event, total) for event in on_host}
    if device != "cpu":  # autograd launches the kernels of the backward pass from a thread of its own
        of_autograd = [event for event in on_host if event.key.startswith(AUTOGRAD)]
        times["backward"] = sum(getattr(event, total) for event in of_autograd)
    parts = {name: times[name] for name in PARTS if name in times}
    table = averages.table(sort_by=f"self_{total}", row_limit=10, max_name_column_width=60)
    lines = table.splitlines()
    if whole := sum(parts.values()):
        shares = ", ".join(f"{name} {time / whole:.1%}" for name, time in parts.items())
        lines.insert(0, f"profile        {shares}")
    return lines
