"""Peak memory of a stretch of a process's life."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune.training.clock import peak_memory_mb


class PeakMemory:
    """The peak from the moment this is made, and what the process held then.

    On a GPU that is what torch's allocator held. On a CPU it is the resident set, whose peak Linux lets us set back
    (/proc/self/clear_refs); elsewhere the peak since the process began stands in for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device) / 2**20
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.set_back = True
        except OSError:
            self.set_back = False
        self.before = psutil.Process().memory_info().rss / 2**20

    def figures(self) -> dict[str, Any]:
        """In MiB: the peak, and how far it is above what was held at the beginning."""
        peak = peak_memory_mb(self.device)
        if self.device.type != "cuda" and self.set_back:
            peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
        return {"peak_memory_mb": peak, "memory_mb": max(0.0, peak - self.before)}
