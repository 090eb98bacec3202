"""Dropout masks drawn by all threads, and an `nn.Dropout` that uses them.

On a CPU, torch (2.13) draws dropout element by element in one thread, which takes a quarter of a BERT's
training step. Here numpy's SFC64 draws 64 bits for four elements at a time. Its seed comes from torch's
generator and the number of the piece, so the sample depends on the seed but not on the number of threads; it
differs from torch's. The dropout rate is rounded to a multiple of 2**-16, and the scale follows the rounded
rate, so the expectation is exactly the input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import has_torch_function_unary

from samerun.kernels.threads import in_threads

LEVELS = 2**16
PIECE = 2**20  # elements per random stream; the sample depends on it


class DropoutMask(NamedTuple):
    """A random mask for one tensor."""

    seed: int
    dropped_levels: int  # of LEVELS: the dropout rate

    @classmethod
    def draw(cls, p: float) -> DropoutMask:
        """A mask of dropout probability `p`, 0 < p < 1. Draws one number from torch's generator."""
        seed = torch.randint(2**63 - 1, ())
        # In a dry run tensors have no values.
        return cls(0 if isinstance(seed, FakeTensor) else int(seed), min(round(p * LEVELS), LEVELS - 1))

    @property
    def scale(self) -> float:
        """The factor on kept elements."""
        return LEVELS / (LEVELS - self.dropped_levels)

    def fill(self, kept: Tensor) -> None:
        """Sets `kept` (uint8, contiguous) to 0 for dropped elements and 1 for kept ones."""
        pieces = kept.view(-1).split(PIECE)
        if not isinstance(kept, FakeTensor):
            in_threads(lambda number: self._fill(number, pieces[number]), range(len(pieces)))

    def _fill(self, number: int, kept: Tensor) -> None:
        levels = (
            np.random.SFC64([self.seed, number]).random_raw(-(-len(kept) // 4)).view(np.int16)[: len(kept)]
        )
        # numpy compares 5 to 20 times faster than torch.
        np.greater_equal(levels, self.dropped_levels - LEVELS // 2, out=kept.numpy().view(np.bool_))


def is_active(x: Tensor, p: float) -> bool:
    """Whether our dropout applies to `x`: on a CPU, except in compiled code and under a torch function mode
    (a dry run for a GPU), which must see torch's function."""
    return (
        x.device.type == "cpu"
        and 0 < p < 1
        and not torch.compiler.is_compiling()
        and not has_torch_function_unary(x)
    )


def dropout(x: Tensor, p: float) -> Tensor:
    """`torch.nn.functional.dropout(x, p)` with another sample."""
    return _DropoutFunction.apply(x, p) if is_active(x, p) else functional.dropout(x, p)


class Dropout(nn.Dropout):
    """`nn.Dropout` with this function."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p) if self.training else input


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        kept, mask = (
            torch.empty_like(x, dtype=torch.uint8, memory_format=torch.contiguous_format),
            DropoutMask.draw(p),
        )
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
    # Multiplying by uint8 would be much slower.
    return (x.contiguous() * kept.to(x.dtype)).mul_(scale)
