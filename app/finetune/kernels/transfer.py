"""Small tensors on their way to a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 where a device has nothing wider (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, made on the host, on `device`; the host does not wait.

    A plain `.to("cuda")` waits until the GPU has done what it was given before; from pinned memory the copy takes its turn.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
