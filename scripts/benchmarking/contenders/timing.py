"""Works of one process timed."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Sample(NamedTuple):
    """What a work took once, CPU seconds of all threads. `memory_mb`: the peak above what was held before, on a GPU."""

    seconds: float
    cpu_seconds: float
    memory_mb: float | None


def timed(work: Callable[[], Any], device: torch.device) -> Sample:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    started, cpu = time.perf_counter(), time.process_time()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    took = time.perf_counter() - started, time.process_time() - cpu
    # On a CPU what earlier works freed is still resident, so that little would show.
    return Sample(*took, (torch.cuda.max_memory_allocated() - held) / 2**20 if on_gpu else None)


def columns(samples: list[Sample]) -> dict[str, list[Any]]:
    return dict(zip(Sample._fields, map(list, zip(*samples, strict=True)), strict=True))
