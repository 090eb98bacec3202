"""The clock that every contender is watched with, in its own process. Needs app/ among the folders Python looks into."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from benchmarking.processes import GO
from finetune.clock import StepClock


class Stopped(Exception):  # noqa: N818 - no error
    """The parent has seen enough steps."""


class Watch:
    """Marks the steps of a contender."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.device = settings, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.clock = StepClock(self.device)
        self.startup: float | None = None
        self.cpu_seconds: list[float] = []  # of each step, all threads
        self.cells = 0
        self._cpu = 0.0

    def mark(self) -> None:
        """Before the first step and after each one; waits for this contender's turn if it has to.

        Raises `Stopped` when there is to be no further step.
        """
        first = self.startup is None
        if first:
            self.startup = time.time() - self.settings["spawned"]
        else:
            self.cpu_seconds.append(time.process_time() - self._cpu)
        self.clock.mark()
        if self.settings["in_turns"]:
            self.clock.read()
            self.clock.pause()
            os.write(self.settings["signals"], b".")
            if os.read(0, 1) != GO:
                raise Stopped
        if first:
            self.begin()
        if self.settings["in_turns"]:
            self.clock.mark()
        self._cpu = time.process_time()

    def begin(self) -> None:
        """Called once, just before the first step."""

    def saw(self, ids: Any) -> None:
        """Counts the places, padding included, of a forward pass."""
        self.cells += ids.shape[0] * ids.shape[1]

    def figures(self) -> dict[str, Any]:
        """What was measured, in seconds: of each step wall and CPU time, and the start."""
        self.clock.read()
        return {
            "contender": self.settings["contender"],
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "startup_seconds": self.startup,
            "step_seconds": self.clock.seconds,
            "step_cpu_seconds": self.cpu_seconds,
        }


class Watched:
    """The training steps of ours, marked where the loop asks for the next one."""

    def __init__(self, steps: Any, watch: Watch) -> None:
        self.steps, self.watch = steps, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.steps, name)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, step: int) -> Any:
        self.watch.mark()
        micro_batches = self.steps[step]
        for batch in micro_batches:
            self.watch.saw(batch.inputs["input_ids"])
        return micro_batches
