"""Step times, measured without synchronising with the device, and memory use."""

from __future__ import annotations

import resource
import sys
import time

import psutil
import torch


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

    def recent(self, steps: int) -> float | None:
        """The mean time of the last `steps` steps in seconds; None before the first one."""
        seconds = self.seconds[-steps:]
        return sum(seconds) / len(seconds) if seconds else None

    def percentile(self, share: float) -> float | None:
        """The quantile `share`, 0 to 1, of the step times in seconds; None before the first step."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


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
