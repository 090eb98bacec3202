"""Memory that a thread keeps from one piece of work to the next."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory, the same for every piece of a thread that asks by the same name: what is there is overwritten.

    On a CPU a thread that gives back some megabytes after each piece gives them back to the system, and spends up to a fifth
    of its time having fresh pages cleared (glibc trims the heaps of threads).
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size, kept = math.prod(shape), _kept.__dict__.get((name, dtype))
    if kept is None or len(kept) < size:
        with torch.inference_mode(False):  # or it could not be written to outside that mode
            kept = _kept.__dict__[name, dtype] = torch.empty(size, dtype=dtype)
    return kept[:size].view(shape)


_kept = threading.local()
