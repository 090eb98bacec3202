"""Measures a contender's time and memory, in its own process."""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarking.processes import GO
from samerun.profiling import StepClock


class PeakMemory:
    """Peak memory since this object was created, and the memory at that moment.

    On a GPU: the memory of torch's allocator. On a CPU: the resident set. Its peak is reset by
    /proc/self/clear_refs; where that is forbidden, the peak counts from the start of the process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device) / 2**20
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.before = psutil.Process().memory_info().rss / 2**20

    def measurements(self) -> dict[str, float]:
        """In MiB: the peak, and its difference from the memory at the beginning."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**20
        else:
            peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
        return {"peak_memory_mb": peak, "memory_mb": max(0.0, peak - self.before)}


class Watch:
    """Marks a contender's steps and ends its turn after every `steps_per_turn` of them.

    On a GPU a turn has several steps, because the end of a turn waits for the device. Contenders warm up for
    "warm_up" all at the same time.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.device = settings, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.clock = StepClock(self.device)
        self.cpu_seconds: list[float] = []  # by step, all threads
        self.memory: PeakMemory | None = None  # since the first step
        self._cpu = 0.0

    def train(self, model: torch.nn.Module, train: Callable[[], Any]) -> None:
        """Runs `train`() and measures any training loop by hooks: steps start at the model's first forward
        pass and end with the optimizer's step."""
        self._hook = model.register_forward_pre_hook(self._begin)
        hook = register_optimizer_step_post_hook(lambda *_: self.mark())
        train()
        hook.remove()

    @torch.compiler.disable
    def _begin(self, *_: Any) -> None:
        self._hook.remove()
        self.mark()

    def once(self, work: Callable[[], Any]) -> Any:
        """Calls `work` in one turn. Returns its result."""
        self.mark()
        result = work()
        self.mark()
        return result

    def mark(self) -> None:
        """Call before the first step and after each one. Waits at the end of a turn."""
        first = self.memory is None
        if first:
            self.startup = {"startup_seconds": time.time() - self.settings["spawned"]}
        else:
            self.cpu_seconds.append(time.process_time() - self._cpu)
        self.clock.mark()
        steps, warm_up = len(self.cpu_seconds), self.settings.get("warm_up", 0)
        wait = steps >= warm_up and (steps - warm_up) % self.settings["steps_per_turn"] == 0
        if wait:
            self.clock.read()
            self.clock.pause()
            os.write(self.settings["signals"], b".")
            if os.read(0, 1) != GO:
                raise SystemExit("the benchmark has ended")
        if first:
            self.memory = PeakMemory(self.device)
        if wait:
            self.clock.mark()
        self._cpu = time.process_time()

    def measurements(self) -> dict[str, Any]:
        """Start-up seconds, wall and CPU seconds of each turn after the warm-up, memory in MiB
        (`PeakMemory`)."""
        self.clock.read()
        turns = {"seconds": self._turns(self.clock.seconds), "cpu_seconds": self._turns(self.cpu_seconds)}
        return {
            "contender": self.settings["contender"],
            **self.startup,
            **turns,
            **self.memory.measurements(),
        }

    def _turns(self, steps: list[float]) -> list[float]:
        size, warm_up = self.settings["steps_per_turn"], self.settings.get("warm_up", 0)
        return [sum(steps[start : start + size]) for start in range(warm_up, len(steps), size)]
