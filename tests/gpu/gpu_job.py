"""Starts one run on the GPU (or on the CPU, with the GPU hidden) and reads its losses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import launchers

from samerun.reports.tracker import read_history

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
LAUNCHERS = {
    "python": launchers.python,
    "torchrun": lambda: launchers.torchrun(1),
    "zero1": lambda: launchers.accelerate("zero1.yaml", 1),
    "zero2": lambda: launchers.accelerate("zero2.yaml", 1),
    "zero3": lambda: launchers.accelerate("zero3.yaml", 1),
    "deepspeed": lambda: launchers.deepspeed(1),
    "fsdp": lambda: launchers.accelerate("fsdp.yaml", 1),
    "fsdp_offload": lambda: launchers.accelerate("fsdp_offload.yaml", 1),
}
TOLERANCE = {"no": 1e-4, "bf16": 5e-2, "fp16": 1e-2}  # of losses, beside fp32 under plain python


def start(home: Path, command: list[str], environment: dict[str, str] | None = None) -> str:
    """Runs a command in `home`; returns what it prints. Fails with its output if it fails."""
    given = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(home / "cache")}
    finished = subprocess.run(
        command, cwd=home, env=given | (environment or {}), capture_output=True, text=True, timeout=900
    )
    assert finished.returncode == 0, f"{finished.stdout[-3000:]}\n{finished.stderr[-6000:]}"
    return finished.stdout


def losses(folder: Path) -> list[float]:
    """The training losses of a run."""
    return [entry["loss"] for entry in read_history(folder) if "loss" in entry]
