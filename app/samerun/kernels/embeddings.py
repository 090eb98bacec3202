"""Reuses the gradient memory of large embeddings between steps, on a CPU.

Replaces: torch's allocation of a gradient for the whole vocabulary in each backward pass, nearly all of it
zeros. Active: in training on a CPU, in one process without DeepSpeed, for weights of at least 2**23 elements
that only embeddings use. Gain: steps are 1.4 and 1.5 times as fast with the 250,037 entries of multilingual
models, 1.07 with MiniLM's vocabulary (benchmarks/notes.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LARGE = 2**23  # elements; glibc returns freed blocks of 32 MiB and more to the system


def can_reuse_gradient_memory(*, kernels: str, on_gpu: bool, wrapped: bool, zero_stage: int) -> bool:
    """Whether a run can reuse gradient memory. `kernels`: --kernels; `wrapped`: in DistributedDataParallel,
    whose hooks need the usual gradient."""
    return kernels == "auto" and not (on_gpu or wrapped or zero_stage)


def reuse_gradient_memory(model: nn.Module) -> list[nn.Parameter]:
    """Switches the reuse on for every large weight of `model` that only embeddings use; returns these
    weights. Parameters, state dict and values stay unchanged.

    A backward pass writes only the rows of its batch; the next step clears only these rows.
    """
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(module)
    weights = []
    for parameter, modules in users.items():
        if parameter.numel() >= LARGE and parameter.requires_grad and all(map(_is_plain, modules)):
            buffer = _GradientBuffer()
            for module in modules:
                module.__class__, module.gradient_buffer = _Embedding, buffer
            weights.append(parameter)
    return weights


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and not (
        module.sparse or module.scale_grad_by_freq or module.max_norm
    )


class _GradientBuffer:
    """The gradient of one weight, and its rows that are not 0."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self.rows: list[Tensor] = []

    def add(self, weight: Tensor, rows: Tensor, gradients: Tensor) -> None:
        """`weight.grad[rows] += gradients`. rows: (n,) int64, with repetitions; gradients: (n, size)."""
        if weight.grad is None:  # first pass of a step
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
    gradient_buffer: _GradientBuffer

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not self.weight.requires_grad or torch.compiler.is_compiling():
            return super().forward(input)
        return _EmbeddingFunction.apply(self.weight, input, self.padding_idx, self.gradient_buffer)


class _EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, buffer: _GradientBuffer
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.buffer = weight, padding, buffer
        return functional.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        rows, gradients = ids.flatten(), gradient.reshape(-1, gradient.shape[-1])
        if ctx.padding is not None:
            gradients = gradients.masked_fill((rows == ctx.padding)[:, None], 0)
        ctx.buffer.add(ctx.weight, rows, gradients)
        return None, None, None, None
