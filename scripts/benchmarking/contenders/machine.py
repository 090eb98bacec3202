"""What the machine is, and the most it can do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from typing import Any

import torch

from benchmarking.watch import Stopped, Watch

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "rjieba")
SECONDS = 0.5  # about so long is a turn of products


def describe(settings: dict[str, Any]) -> dict[str, Any]:
    """The device that everything here will run on, its precision by default, and the versions of what matters."""
    cuda = torch.cuda.is_available()
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "kind": "cuda" if cuda else "cpu",
        "name": torch.cuda.get_device_name() if cuda else cpu_info("model name") or platform.processor() or platform.machine(),
        "precision": "bf16" if cuda and torch.cuda.is_bf16_supported() else "no",
        "cpu_has_bf16": bool({"amx_bf16", "avx512_bf16"} & set(cpu_info("flags").split())),
        "gpus": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "versions": versions,
    }


def cpu_info(entry: str) -> str:
    """What Linux says of the processor, such as its "model name" or "flags"; nothing where it does not."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith(entry))
    except (OSError, StopIteration):
        return ""


def products(settings: dict[str, Any]) -> dict[str, Any]:
    """Turns of large matrix products in the run's precision: the peak that model FLOPs are held against.

    `units`: floating-point operations of each turn, 2 n^3 a product.
    """
    watch = Watch(settings)
    half = settings["precision"] == "bf16"
    size = settings["product_size"]
    a, b = (torch.randn(size, size, device=watch.device, dtype=torch.bfloat16 if half else torch.float32) for _ in range(2))
    torch.set_float32_matmul_precision("high")  # TF32, where there is such a thing
    out = a @ b
    count = 1
    while (seconds := _time(watch.device, a, b, out, count)) < SECONDS / 4:
        count *= 2
    count = max(1, int(count * SECONDS / seconds))
    with suppress(Stopped):
        watch.mark()
        for _ in range(settings["max_steps"]):
            for _ in range(count):
                torch.matmul(a, b, out=out)
            watch.mark()
    figures = watch.figures()
    return figures | {"units": [2 * size**3 * count] * len(figures["step_seconds"])}


def _time(device: torch.device, a: Any, b: Any, out: Any, count: int) -> float:
    from finetune.training.clock import StepClock

    clock = StepClock(device)
    clock.mark()
    for _ in range(count):
        torch.matmul(a, b, out=out)
    clock.mark()
    return clock.read()


CONTENDERS = {"describe": describe, "products": products}
