"""The clock and the memory of a contender, in its own process."""

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
from finetune.training.clock import StepClock


class Stopped(Exception):  # noqa: N818 - no error
    """The parent has seen enough steps."""


class PeakMemory:
    """The peak from the moment this is made, and what the process held then.

    On a GPU that is what torch's allocator held. On a CPU it is the resident set, whose peak Linux lets a process reset
    (/proc/self/clear_refs); where that is forbidden, the peak counts from the start of the process.
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
        """In MiB: the peak, and how far it is above what was held at the beginning."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**20
        else:
            peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
        return {"peak_memory_mb": peak, "memory_mb": max(0.0, peak - self.before)}


class Watch:
    """Marks the steps of a contender, and hands its turn over after every few of them.

    A turn is one step on a CPU. On a GPU it is `steps_per_turn`, within which nothing waits for the device.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.device = settings, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.clock = StepClock(self.device)
        self.cpu_seconds: list[float] = []  # of each step, all threads
        self.memory: PeakMemory | None = None  # from the first step on
        self._cpu = 0.0

    def train(self, model: torch.nn.Module, train: Callable[[], Any]) -> None:
        """Runs `train`(), whoever wrote its loop. Steps begin with the model's first forward pass and end with the
        optimizer's."""
        self._hook = model.register_forward_pre_hook(self._begin)
        hook = register_optimizer_step_post_hook(lambda *_: self.mark())
        with suppress(Stopped):
            train()
        hook.remove()

    def _begin(self, *_: Any) -> None:
        self._hook.remove()
        self.mark()

    def repeat(self, work: Callable[[], Any], count: int) -> Any:
        """Does the work `count` times, or until it is stopped, a step each; returns what it gave last."""
        result = None
        with suppress(Stopped):
            self.mark()
            for _ in range(count):
                result = work()
                self.mark()
        return result

    def mark(self) -> None:
        """Before the first step and after each one; waits for this contender's turn.

        Raises `Stopped` when there is to be no further step.
        """
        first = self.memory is None
        if first:
            self.startup = {"startup_seconds": time.time() - self.settings["spawned"]}
        else:
            self.cpu_seconds.append(time.process_time() - self._cpu)
        self.clock.mark()
        wait = len(self.cpu_seconds) % self.settings["steps_per_turn"] == 0
        if wait:
            self.clock.read()
            self.clock.pause()
            os.write(self.settings["signals"], b".")
            if os.read(0, 1) != GO:
                raise Stopped
        if first:
            self.memory = PeakMemory(self.device)
        if wait:
            self.clock.mark()
        self._cpu = time.process_time()

    def measurements(self) -> dict[str, Any]:
        """What was measured: the start, wall and CPU seconds of each turn after the warm-up, memory in MiB (`PeakMemory`)."""
        self.clock.read()
        turns = {"seconds": self._turns(self.clock.seconds), "cpu_seconds": self._turns(self.cpu_seconds)}
        return {"contender": self.settings["contender"], **self.startup, **turns, **self.memory.measurements()}

    def _turns(self, steps: list[float]) -> list[float]:
        size, warm_up = self.settings["steps_per_turn"], self.settings.get("warm_up", 0)
        return [sum(steps[start : start + size]) for start in range(0, len(steps), size)][warm_up:]
