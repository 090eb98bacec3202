"""Whether a kernel for padding-free batches gives here what one call per length gives, found out before a run relies on it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from finetune.kernels.padding_free import kernels
from finetune.kernels.padding_free.batch import padding_free_batch
from finetune.kernels.self_test import compare, passes, with_gradients

LENGTHS, HEADS = (65, 1, 17, 17, 130), 2
DROPOUT = 0.1


@functools.cache
def works(name: str, device: torch.device, dtype: torch.dtype, size: int, with_dropout: bool) -> bool:
    """Whether the kernel of that name runs on `device` for heads of `size`, forward and backward, and is right; with dropout,
    whether it gives numbers."""
    failure = f"padding-free attention does without its {name} kernel ({dtype}, heads of {size})"
    return passes(lambda: _problem(name, device, dtype, size, with_dropout), failure)


def _problem(name: str, device: torch.device, dtype: torch.dtype, size: int, with_dropout: bool) -> str | None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, sum(LENGTHS), HEADS, size, generator=generator).to(device, dtype)
    mask = torch.stack([torch.arange(max(LENGTHS)) < length for length in LENGTHS]).to(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        problem = compare(_results(name, inputs, mask, 0.0), _results("by_length", inputs, mask, 0.0))
        if problem is None and with_dropout and not all(x.isfinite().all() for x in _results(name, inputs, mask, DROPOUT)):
            problem = "with dropout it gives no numbers"
    return problem


def _results(name: str, inputs: Tensor, mask: Tensor, dropout: float) -> list[Tensor]:
    given = [x.clone().requires_grad_() for x in inputs[:3]]
    context = getattr(kernels, name)(*given, padding_free_batch(mask, LENGTHS), dropout, inputs.shape[-1] ** -0.5)
    return with_gradients(context, inputs[3], given)
