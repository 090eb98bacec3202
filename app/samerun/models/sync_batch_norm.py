"""Batch norm over the rows of all processes, and over a single value per channel."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.nn.functional import all_reduce  # its gradient is summed over processes, too
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def allow_single_values(model: nn.Module, kind: type[BatchNorm] | None = None) -> nn.Module:
    """Replaces batch norms by `kind` (`BatchNorm`) in place. Names of parameters and buffers stay."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = kind or BatchNorm  # has the same state
    return model


def synchronise_batch_norm(model: nn.Module, on_gpu: bool) -> nn.Module:
    """Replaces batch norms by `torch.nn.SyncBatchNorm`, or by `SyncBatchNormOnCpu` on a CPU, where torch's
    does not run. Names of parameters and buffers stay."""
    if not on_gpu:
        return allow_single_values(model, SyncBatchNormOnCpu)
    return allow_single_values(nn.SyncBatchNorm.convert_sync_batchnorm(model), SyncBatchNormOnGpu)


class BatchNorm(_BatchNorm):
    """Normalises a single value per channel by the running statistics. torch raises an error in training,
    since one value has no variance. This happens in micro-batches of one row if a network pools the whole
    image.

    On a CPU it sums precisely. For the channels_last format torch adds a channel's values one by one in fp32.
    On MNIST, units of the small CNN's first linear layer then switch, and a step's gradient is 1 to 3 % off
    (torch 2.13, against float64)."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.running_mean is None:
            return super().forward(input)
        if self.affine and self.weight.dtype != self.running_mean.dtype:
            return self._with_full_weights(input)
        if not self.training:
            return super().forward(input)
        if input.numel() == input.shape[1]:
            statistics = self.running_mean, self.running_var
            return batch_norm(input, *statistics, self.weight, self.bias, eps=self.eps)
        last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
        if not (last and self.affine and (input.device.type, input.dtype) == ("cpu", torch.float32)):
            return super().forward(input)
        output, mean, variance = _PreciseBatchNorm.apply(input, self.weight, self.bias, self.eps)
        count = input.numel() / input.shape[1]
        self._track(mean, variance * count / (count - 1))
        return output

    def _with_full_weights(self, input: torch.Tensor) -> torch.Tensor:
        """DeepSpeed's bf16 and fp16 halve the weights, not the statistics, and torch refuses the mixture."""
        whole = copy.copy(self)  # shares the statistics
        dtype = self.running_mean.dtype
        whole._parameters = {name: weight.to(dtype) for name, weight in self._parameters.items()}
        return whole.forward(input)  # without the hooks once more

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


class _PreciseBatchNorm(torch.autograd.Function):
    """Batch norm of a channels_last tensor by torch's kernels, with statistics from torch's sums, which add
    up in pairs. Returns (output, mean, variance over the batch)."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float):
        values = input.movedim(1, -1).reshape(-1, input.shape[1])
        mean = values.mean(0)
        variance = (values - mean).square_().mean(0)
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps))
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance)
        return batch_norm(input, mean, variance, weight, bias, eps=eps), mean, variance

    @staticmethod
    def backward(ctx, gradient: torch.Tensor, *_: Any):
        input, weight, *statistics = ctx.saved_tensors
        gradients = torch.ops.aten.native_batch_norm_backward(
            gradient, input, weight, None, None, *statistics, True, ctx.eps, [True, True, True]
        )
        return *gradients, None


class SyncBatchNormOnGpu(nn.SyncBatchNorm, BatchNorm):
    """torch's, but for a dry run (FakeTensor), which one process makes alone, and for weights in half
    precision."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, FakeTensor):
            return BatchNorm.forward(self, input)
        if self.affine and self.track_running_stats and self.weight.dtype != self.running_mean.dtype:
            return self._with_full_weights(input)
        return super().forward(input)


class SyncBatchNormOnCpu(BatchNorm):
    """Batch norm over the rows of all processes. The variance takes a second pass, since E[x^2] - E[x]^2
    loses precision in fp32. Placeholder rows count, too."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Only one process makes a dry run (FakeTensor); it must not wait for the others.
        alone = not dist.is_initialized() or dist.get_world_size() == 1 or isinstance(input, FakeTensor)
        if not self.training or alone:
            return super().forward(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        values = input.float()  # for precise sums
        own = torch.cat([values.sum(axes), values.new_tensor([values.numel() / values.shape[1]])])
        total = all_reduce(own)
        count, mean = total[-1].detach(), total[:-1] / total[-1].detach()
        centred = values - mean.view(shape)
        variance = all_reduce(centred.square().sum(axes)) / count
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * count / (count - 1))
        output = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)
