"""What the machine is, and the most it can do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from functools import partial
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


def products(settings: dict[str, Any]) -> dict[str, Any]:
    """Turns of large matrix products in the run's precision: the peak that model FLOPs are held against. `units`: operations of
    each turn."""
    size, kind = settings["product_size"], torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, b, out = (torch.randn(size, size, device=device, dtype=kind) for _ in range(3))
    torch.set_float32_matmul_precision("high")  # TF32, where there is such a thing
    multiply = partial(torch.matmul, a, b, out=out)
    multiply()
    count = max(1, int(SECONDS / timed(multiply, device).seconds))
    _, measured = watch_passes(settings, lambda: [multiply() for _ in range(count)], settings["product_turns"])
    return measured | {"units": [2 * size**3 * count] * len(measured["step_seconds"])}


CONTENDERS = {"describe": describe, "products": products}
