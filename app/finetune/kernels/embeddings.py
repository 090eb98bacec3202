"""The gradients of large embeddings on a CPU, kept from step to step.

Replaces: torch's gradient of a whole vocabulary in each backward pass, nearly all of it zeros in fresh pages.
Active: in training on a CPU, in one process without DeepSpeed, for weights of at least 2**23 numbers that only embeddings
use.
Gain: steps are 1.4 and 1.5 times as fast with the 250,037 entries of multilingual models, 1.07 with MiniLM's vocabulary
(docs/speed.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Numbers in a weight. From 32 MiB on glibc takes every block from the system and gives it back when it is freed.
LARGE = 2**23


def keeps_gradients(*, kernels: str, on_gpu: bool, wrapped: bool, zero_stage: int) -> bool:
    """Whether a run keeps them. `kernels`: --kernels; `wrapped`: in DistributedDataParallel, whose hooks wait for a gradient at
    the weight's end of the graph."""
    return kernels == "auto" and not (on_gpu or wrapped or zero_stage)


def keep_gradients(model: nn.Module) -> list[nn.Parameter]:
    """Has every large weight of `model` that nothing but embeddings use add its gradient, in each backward pass, to memory
    that is kept; returns these weights. Parameters, state dict and values stay as they are.

    Only the rows of a pass are written to, and only those of the last step are cleared.
    """
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(module)
    found = []
    for parameter, modules in users.items():
        if parameter.numel() >= LARGE and parameter.requires_grad and all(map(_is_plain, modules)):
            kept = _Kept()
            for module in modules:
                module.__class__, module.kept_gradient = _Embedding, kept
            found.append(parameter)
    return found


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and not (module.sparse or module.scale_grad_by_freq or module.max_norm)


class _Kept:
    """One weight's gradient between steps, and which of its rows are not 0."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self.rows: list[Tensor] = []

    def add(self, weight: Tensor, rows: Tensor, gradients: Tensor) -> None:
        """`weight.grad[rows] += gradients`. rows: (n,) int64, with repetitions; gradients: (n, size)."""
        if weight.grad is None:  # the first pass of a step
            if self.gradient is None:
                self.gradient = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            for written in self.rows:
                self.gradient.index_fill_(0, written, 0)
            self.rows = []
            weight.grad = self.gradient
        if weight.grad is self.gradient:
            self.rows.append(rows)
        weight.grad.index_add_(0, rows, gradients.to(weight.dtype))


class _Embedding(nn.Embedding):
    kept_gradient: _Kept

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not self.weight.requires_grad or torch.compiler.is_compiling():
            return super().forward(input)
        return _LookedUp.apply(self.weight, input, self.padding_idx, self.kept_gradient)


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, kept: _Kept) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.kept = weight, padding, kept
        return functional.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        rows, gradients = ids.flatten(), gradient.reshape(-1, gradient.shape[-1])
        if ctx.padding is not None:
            gradients = gradients.masked_fill((rows == ctx.padding)[:, None], 0)
        ctx.kept.add(ctx.weight, rows, gradients)
        return None, None, None, None
