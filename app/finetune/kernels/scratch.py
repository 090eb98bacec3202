"""Memory that a thread keeps from one piece of work to the next."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Uninitialised memory on the device of `like`, on a CPU the same for every piece of a thread that asks by the same name:
    what is there is overwritten.

    A thread that gives back some megabytes after each piece gives them back to the system, and spends up to a fifth of its
    time having fresh pages cleared (glibc trims the heaps of threads).
    """
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=like.device)
    memory = _kept.__dict__
    if isinstance(like, FakeTensor):  # a rehearsal of the memory (finetune.memory_estimate), which begins with none
        if like.fake_mode not in _rehearsed:
            _rehearsed.clear()
        memory = _rehearsed.setdefault(like.fake_mode, {})
    size, kept = math.prod(shape), memory.get((name, dtype))
    if kept is None or len(kept) < size:
        with torch.inference_mode(False):  # or it could not be written to outside that mode
            kept = memory[name, dtype] = like.new_empty(size, dtype=dtype)
    return kept[:size].view(shape)


_kept = threading.local()
_rehearsed: dict[FakeTensorMode, dict] = {}
