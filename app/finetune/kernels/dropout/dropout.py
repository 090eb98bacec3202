"""Dropout on a CPU: torch's but for the noise, which is `finetune.kernels.dropout.stream`'s."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import has_torch_function_unary

from finetune.kernels.dropout.stream import Noise
from finetune.kernels.scratch import scratch

AT_ONCE = 2**21  # elements that are worked on at once, in memory that is kept


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
        kept, noise = torch.empty_like(x, dtype=torch.uint8, memory_format=torch.contiguous_format), Noise.of(p)
        noise.fill(kept)
        ctx.scale = noise.scale
        ctx.save_for_backward(kept)
        return _scaled(x, kept, noise.scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return _scaled(gradient, kept, ctx.scale), None


def _scaled(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    """`x` times `kept` times `scale`."""
    x = x.contiguous()
    result = torch.empty_like(x)
    for part, own, out in zip(*(y.view(-1).split(AT_ONCE) for y in (x, kept, result)), strict=True):
        torch.mul(part, factors_of(own, x.dtype), out=out).mul_(scale)
    return result


def factors_of(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """What to multiply by, until the next: much faster than by bytes."""
    return scratch("factors", kept.shape, dtype, kept).copy_(kept)
