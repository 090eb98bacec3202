"""What the machine is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from typing import Any

import torch

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers")


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
        "gpus": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "versions": versions,
    }


CONTENDERS = {"describe": describe}
