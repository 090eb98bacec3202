"""Dropout masks, drawn by all threads; and `nn.Dropout` with them.

torch (2.13) draws dropout on a CPU element by element in one thread, in a quarter of the time of a BERT's training step. Here
numpy's SFC64, seeded from torch's generator and the number of the piece, draws 64 bits at a time, 16 of which decide about an
element. The dropped share is a multiple of 2**-16, and the rest is scaled by that very share, so that the expectation is the
input. The sample is not torch's; the same seed gives the same sample on any number of threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import has_torch_function_unary

from finetune.kernels.threads import in_threads

LEVELS = 2**16
PIECE = 2**20  # elements with a random stream of their own; the sample depends on it


class DropoutMask(NamedTuple):
    """Which elements of one tensor are dropped."""

    seed: int
    dropped_levels: int  # of LEVELS

    @classmethod
    def draw(cls, p: float) -> DropoutMask:
        """Of probability `p`, 0 < p < 1; seeded by torch's generator, which advances by one number."""
        seed = torch.randint(2**63 - 1, ())
        # In a dry run (finetune.memory_estimate) numbers have no values.
        return cls(0 if isinstance(seed, FakeTensor) else int(seed), min(round(p * LEVELS), LEVELS - 1))

    @property
    def scale(self) -> float:
        """The factor of elements that are kept."""
        return LEVELS / (LEVELS - self.dropped_levels)

    def fill(self, kept: Tensor) -> None:
        """Sets `kept` (uint8, contiguous) to 1, or to 0 where an element is dropped."""
        pieces = kept.view(-1).split(PIECE)
        if not isinstance(kept, FakeTensor):
            in_threads(lambda number: self._fill(number, pieces[number]), range(len(pieces)))

    def _fill(self, number: int, kept: Tensor) -> None:
        levels = np.random.SFC64([self.seed, number]).random_raw(-(-len(kept) // 4)).view(np.int16)[: len(kept)]
        # numpy compares 5 to 20 times as fast as torch.
        np.greater_equal(levels, self.dropped_levels - LEVELS // 2, out=kept.numpy().view(np.bool_))


def is_active(x: Tensor, p: float) -> bool:
    """Whether this package drops elements of `x`: on a CPU, but not in compiled code, nor where a mode (the dry run of a GPU's
    memory) must see torch's own function."""
    return x.device.type == "cpu" and 0 < p < 1 and not torch.compiler.is_compiling() and not has_torch_function_unary(x)


def dropout(x: Tensor, p: float) -> Tensor:
    """`torch.nn.functional.dropout(x, p)` with another sample of the mask."""
    return _DropoutFunction.apply(x, p) if is_active(x, p) else functional.dropout(x, p)


class Dropout(nn.Dropout):
    """torch's module with this function."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p) if self.training else input


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        kept, mask = torch.empty_like(x, dtype=torch.uint8, memory_format=torch.contiguous_format), DropoutMask.draw(p)
        mask.fill(kept)
        ctx.scale = mask.scale
        ctx.save_for_backward(kept)
        return _apply(x, kept, mask.scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return _apply(gradient, kept, ctx.scale), None


def _apply(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    # Multiplying by bytes would be much slower.
    return (x.contiguous() * kept.to(x.dtype)).mul_(scale)
