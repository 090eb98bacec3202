"""Works of one process timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Work = Callable[[int], Any]  # gets the number of the turn


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


def take_turns(
    works: dict[Key, Work], device: torch.device, turns: int, warm_up: int, before: Callable[[Work, int], Any] | None = None
) -> dict[Key, list[Sample]]:
    """Samples of each work, in turns whose order changes, without the first `warm_up`. `before` is called with the work and
    the turn before each."""
    samples: dict[Key, list[Sample]] = {key: [] for key in works}
    for turn in range(turns + warm_up):
        for key in list(works) if turn % 2 else list(works)[::-1]:
            if before is not None:
                before(works[key], turn)
            sample = timed(lambda key=key, turn=turn: works[key](turn), device)
            if turn >= warm_up:
                samples[key].append(sample)
    return samples


def summary(samples: list[Sample]) -> dict[str, Any]:
    seconds = [sample.seconds for sample in samples]
    return {
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(sample.cpu_seconds for sample in samples),
        "at_best": min(seconds),
        "memory_mb": samples[-1].memory_mb,
    }
