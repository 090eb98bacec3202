"""Dropout on a CPU.

torch (2.13) draws its noise on a CPU element by element, in a quarter of the time of a BERT's training step, and keeps it in
four bytes each. Here numpy's SFC64, seeded from torch's generator, draws 64 bits at a time, 16 of which decide about an
element; one byte is kept. The share of what is dropped is a multiple of 2**-16, and what is left is scaled by that very share,
so that the expectation is the input. The noise is another sample than torch's; the same seed gives the same sample.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import has_torch_function_unary

LEVELS = 2**16


def draws_here(x: Tensor, p: float) -> bool:
    """Whether the noise of `x` is drawn here and not by torch: on a CPU, but not into code that is compiled, nor where a mode
    (a rehearsal of a GPU's memory) is to see torch's own function."""
    return x.device.type == "cpu" and 0 < p < 1 and not torch.compiler.is_compiling() and not has_torch_function_unary(x)


def dropout(x: Tensor, p: float) -> Tensor:
    """`torch.nn.functional.dropout(x, p)` with another sample of the noise."""
    return _Dropped.apply(x, p) if draws_here(x, p) else functional.dropout(x, p)


class Dropout(nn.Dropout):
    """torch's module with this noise."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p) if self.training else input


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        hidden = min(round(p * LEVELS), LEVELS - 1)  # levels of a drawn number that drop an element
        ctx.scale = LEVELS / (LEVELS - hidden)
        kept = torch.empty_like(x, dtype=torch.uint8) if isinstance(x, FakeTensor) else _draw(x.shape, hidden)
        ctx.save_for_backward(kept)
        return (x * kept).mul_(ctx.scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return (gradient * kept).mul_(ctx.scale), None


def _draw(shape: torch.Size, hidden: int) -> Tensor:
    """1 or, for `hidden` elements of 2**16, 0: uint8 of that shape, which torch multiplies by faster than by booleans."""
    number = math.prod(shape)
    stream = np.random.SFC64(int(torch.randint(2**63 - 1, ())))
    levels = stream.random_raw(-(-number // 4)).view(np.int16)[:number]
    return (torch.from_numpy(levels) >= hidden - LEVELS // 2).view(torch.uint8).view(shape)
