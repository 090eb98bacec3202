"""Copies of small tensors to a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to `device` without waiting. A plain `.to("cuda")` waits until the GPU has
    finished all queued work; a copy from pinned memory is queued."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
