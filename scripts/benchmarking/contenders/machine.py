"""Describes the machine."""

import os
import platform
from typing import Any

import cpuinfo  # comes with DeepSpeed
import torch


def describe(settings: dict[str, Any]) -> dict[str, Any]:
    """The device of the benchmark and its default precision."""
    cuda, machine = torch.cuda.is_available(), platform.machine()
    return {
        "kind": "cuda" if cuda else "cpu",
        "name": torch.cuda.get_device_name() if cuda else cpuinfo.get_cpu_info().get("brand_raw", machine),
        "precision": "bf16" if cuda and torch.cuda.is_bf16_supported() else "no",
        "cores": os.cpu_count(),
        "architecture": machine,
    }


CONTENDERS = {"describe": describe}
