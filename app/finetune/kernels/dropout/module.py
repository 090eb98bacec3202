"""`nn.Dropout` on a CPU with masks of `finetune.kernels.dropout.mask`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import has_torch_function_unary

from finetune.kernels.dropout.mask import DropoutMask


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
