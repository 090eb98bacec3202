"""How long steps take, measured without making the device wait."""

from __future__ import annotations

import resource
import sys
import time

import psutil
import torch


class StepClock:
    """Seconds per step. On a GPU the marks are CUDA events, read only after the device was waited for anyway."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.seconds: list[float] = []
        self._marks: list = []

    def mark(self) -> None:
        """Notes the present: after every step, and once before the first and after every pause."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def read(self) -> float:
        """Turns the marks so far into seconds per step; returns their sum and starts again from the last mark."""
        if self.on_gpu and self._marks:
            self._marks[-1].synchronize()
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        new = [start.elapsed_time(end) / 1000 if self.on_gpu else end - start for start, end in pairs]
        self.seconds += new
        self._marks = self._marks[-1:]
        return sum(new)

    def pause(self) -> None:
        """Forgets the last mark, so that what comes before the next one is not counted as a step."""
        self._marks = []

    def recent(self, steps: int) -> float | None:
        """The mean step time of the last steps, in seconds; None before the first one."""
        seconds = self.seconds[-steps:]
        return sum(seconds) / len(seconds) if seconds else None

    def percentile(self, share: float) -> float | None:
        """The step time that `share` of the steps stay below, in seconds; None before the first step."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process in MiB: what the allocator held on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def memory_mb(device: torch.device) -> float:
    """Memory of this process now, in MiB: what the allocator holds on a GPU (it does not wait for it), resident memory on a
    CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) / 2**20
    return psutil.Process().memory_info().rss / 2**20
