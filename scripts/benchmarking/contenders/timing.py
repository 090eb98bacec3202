"""Times function calls within one process."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Sample(NamedTuple):
    """The cost of one call. `cpu_seconds`: of all threads; `memory_mb`: on a GPU, the peak above the memory
    before the call."""

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
    # Not on a CPU, where memory that earlier calls freed is still resident.
    return Sample(*took, (torch.cuda.max_memory_allocated() - held) / 2**20 if on_gpu else None)


def columns(samples: list[Sample]) -> dict[str, list[Any]]:
    return dict(zip(Sample._fields, map(list, zip(*samples, strict=True)), strict=True))
