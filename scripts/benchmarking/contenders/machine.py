"""What the machine is, and the most it can do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from typing import Any

import torch

from benchmarking.contenders.timing import timed
from benchmarking.watch import watch_passes

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "rjieba")
SECONDS = 0.5  # about so long is a turn of products


def describe(settings: dict[str, Any]) -> dict[str, Any]:
    """The device that everything here will run on, its precision by default, and the versions of what matters."""
    import cpuinfo  # comes with DeepSpeed

    cuda, cpu = torch.cuda.is_available(), cpuinfo.get_cpu_info()
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "kind": "cuda" if cuda else "cpu",
        "name": torch.cuda.get_device_name() if cuda else cpu.get("brand_raw", platform.machine()),
        "precision": "bf16" if cuda and torch.cuda.is_bf16_supported() else "no",
        "cpu_has_bf16": bool({"amx_bf16", "avx512_bf16"} & set(cpu.get("flags", ()))),
        "gpus": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "versions": versions,
    }


class Products:
    """Large matrix products in the run's precision."""

    def __init__(self, settings: dict[str, Any]) -> None:
        size, half = settings["product_size"], settings["precision"] == "bf16"
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        given = {"device": self.device, "dtype": torch.bfloat16 if half else torch.float32}
        torch.set_float32_matmul_precision("high")  # TF32, where there is such a thing
        self.a, self.b, self.out = (torch.randn(size, size, **given) for _ in range(3))
        self.count = 1
        while (seconds := timed(self.multiply, self.device).seconds) < SECONDS / 4:
            self.count *= 2
        self.count = max(1, int(self.count * SECONDS / seconds))
        self.operations = 2 * size**3 * self.count

    def multiply(self) -> None:
        for _ in range(self.count):
            torch.matmul(self.a, self.b, out=self.out)


def products(settings: dict[str, Any]) -> dict[str, Any]:
    """Turns of products: the peak that model FLOPs are held against. `units`: floating-point operations of each turn."""
    work = Products(settings)
    _, measured = watch_passes(settings, work.multiply, settings["product_turns"])
    return measured | {"units": [work.operations] * len(measured["step_seconds"])}


CONTENDERS = {"describe": describe, "products": products}
