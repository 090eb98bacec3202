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


class Watch:
    """Marks a contender's steps and ends its turn after every "steps_per_turn" of them.

    On a GPU a turn has several steps, because its end waits for the device. Contenders warm up for "warm_up"
    steps all at the same time.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.device = settings, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.steps = 0  # marks so far, the first one included
        self.seconds = self.cpu_seconds = 0.0  # of all turns, and of all threads in them

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

    def mark(self) -> None:
        """Call before the first step and after each one. Waits at the end of a turn."""
        measured = self.steps - self.settings.get("warm_up", 0)
        ends_turn = measured >= 0 and measured % self.settings["steps_per_turn"] == 0
        if ends_turn:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            if measured:
                self.seconds += time.perf_counter() - self._started
                self.cpu_seconds += time.process_time() - self._cpu_started
            os.write(self.settings["signals"], b".")
            if os.read(0, 1) != GO:
                raise SystemExit("the benchmark has ended")
        if not self.steps:
            self._memory_before = self._begin_memory()
        self.steps += 1
        if ends_turn:
            self._started, self._cpu_started = time.perf_counter(), time.process_time()

    def _begin_memory(self) -> float:
        """MiB in use now, from which the peak counts: of torch's allocator on a GPU, else resident. Where the
        resident peak cannot be reset, it counts from the start of the process."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated() / 2**20
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        return psutil.Process().memory_info().rss / 2**20

    def measurements(self) -> dict[str, Any]:
        """Wall and CPU seconds of the turns after the warm-up; MiB of the peak above the memory before the
        first step."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**20
        else:
            peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
        return {
            "contender": self.settings["contender"],
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "memory_mb": max(0.0, peak - self._memory_before),
        }
