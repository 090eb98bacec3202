"""The clock that every contender is watched with, in its own process. Needs app/ among the folders Python looks into."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from benchmarking.memory import PeakMemory
from benchmarking.processes import GO
from finetune.training.clock import StepClock


class Stopped(Exception):  # noqa: N818 - no error
    """The parent has seen enough steps."""


class Done(Exception):  # noqa: N818 - no error
    """Leaves the application once the measured part is over."""


class Watch:
    """Marks the steps of a contender, and hands its turn over after every few of them.

    A turn is one step on a CPU. On a GPU it is `steps_per_turn`, within which nothing waits for the device.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.device = settings, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.clock = StepClock(self.device)
        self.startup: float | None = None
        self.startup_cpu = 0.0
        self.cpu_seconds: list[float] = []  # of each step, all threads
        self.cells = 0
        self.memory: PeakMemory | None = None
        self._cpu = 0.0

    def mark(self) -> None:
        """Before the first step and after each one; waits for this contender's turn if it has to.

        Raises `Stopped` when there is to be no further step.
        """
        first = self.startup is None
        if first:
            self.startup, self.startup_cpu = time.time() - self.settings["spawned"], time.process_time()
        else:
            self.cpu_seconds.append(time.process_time() - self._cpu)
        self.clock.mark()
        if self.settings["in_turns"] and len(self.cpu_seconds) % self.settings.get("steps_per_turn", 1) == 0:
            self.clock.read()
            self.clock.pause()
            os.write(self.settings["signals"], b".")
            if os.read(0, 1) != GO:
                raise Stopped
            if first:
                self.memory = PeakMemory(self.device)
            self.clock.mark()
        elif first:
            self.memory = PeakMemory(self.device)
        self._cpu = time.process_time()

    def saw(self, ids: Any) -> None:
        """Counts the places, padding included, of a forward pass."""
        self.cells += ids.shape[0] * ids.shape[1]

    def figures(self) -> dict[str, Any]:
        """What was measured: the start, wall and CPU seconds of each step, memory in MiB (see `PeakMemory`)."""
        self.clock.read()
        return {
            "contender": self.settings["contender"],
            "startup_seconds": self.startup,
            "startup_cpu_seconds": self.startup_cpu,
            "step_seconds": self.clock.seconds,
            "step_cpu_seconds": self.cpu_seconds,
            **self.memory.figures(),
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


def warm_up(model: Any, bf16: bool) -> None:
    """On a GPU, one pass over two short rows: libraries are loaded and kernels chosen on first use, which is no step's cost."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return
    rows = torch.full((2, 32), 5, device=device)
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        out = model(input_ids=rows, attention_mask=torch.ones_like(rows))
    out.logits.float().sum().backward()
    model.zero_grad()
    torch.cuda.synchronize()
