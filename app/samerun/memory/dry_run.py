"""A forward and backward pass on tensors without values (torch's FakeTensor), which measures the peak memory
of activations.

It works for every architecture, attention, loss and gradient checkpointing, because it counts the tensors
that are alive.
"""

from __future__ import annotations

import copy
import sys
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import _lru_cache_wrapper
from types import FunctionType
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from samerun.fsdp import layers_to_shard
from samerun.kernels.common import row_lengths
from samerun.kernels.embeddings import reuse_gradient_memory
from samerun.memory.layout import Layout
from samerun.task import Batch, Task

# attribute of layers in 4 or 8 bits (samerun.models.quantized), which hold fp32 before training
BYTES = "bytes_per_element"


@dataclass(frozen=True)
class DryRun:
    """Sizes of a model, and peak memory of a forward and backward pass over one micro-batch."""

    parameters: int  # elements
    trainable: int  # elements of trained parameters
    largest_parameter: int  # elements of the largest trained parameter
    buffers: int  # bytes
    activations: int  # peak bytes without finished gradients of parameters
    with_gradients: int  # peak bytes with gradients of parameters
    input_shape: tuple[int, ...]  # of the largest input
    quantization_savings: int = 0  # bytes that weights in 4 or 8 bits save compared with fp32
    largest_layer: int = 0  # elements of the largest layer that FSDP gathers on its own
    outside_layers: int = 0  # elements outside of these layers, which stay gathered during the pass

    @property
    def input_size(self) -> str:
        """`input_shape` as in 16x512."""
        return "x".join(map(str, self.input_shape))


def dry_run(model: nn.Module, task: Task, batch: Batch, layout: Layout) -> DryRun:
    """Runs a forward and backward pass of `model` on tensors without values and counts live bytes.

    `model`: any module before `prepare`, on any device, `meta` included; it is not changed, and its values
    are not copied. The precision is that of `layout`. On a CPU the result matches the allocator within
    kilobytes (docs/memory.md). A GPU's kernels are simulated: fused attention, one byte per element for
    dropout, normalisation in fp32 under autocast. Raises any exception of a model whose forward pass reads
    values.
    """
    rng_state = torch.get_rng_state()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            hollow = _without_values(model, layout.own_precision).train()
            if layout.autocast is not None:  # like Accelerate
                hollow.forward = convert_outputs_to_fp32(
                    torch.autocast("cpu", dtype=layout.autocast)(hollow.forward)
                )
            inputs = {name: _empty(tensor, layout.own_precision) for name, tensor in batch.inputs.items()}
            labels = None if batch.labels is None else _empty(batch.labels)
            kept = reuse_gradient_memory(hollow) if layout.reuses_gradient_memory else []
            for parameter in kept:
                parameter.grad = torch.zeros_like(parameter)  # as after an earlier step
            kernels = _GpuKernels(layout.autocast) if layout.on_gpu else nullcontext()
            with _Counter(hollow) as counter, kernels, row_lengths(batch.lengths):
                _backward(
                    task.loss_sum(
                        hollow, replace(batch, rows=_empty(batch.rows), inputs=inputs, labels=labels)
                    )
                )
    finally:
        torch.set_rng_state(rng_state)
        _empty_caches(model)
    layers = [] if layout.fsdp is None else layers_to_shard(model, layout.fsdp)
    in_layers = {parameter: parameter.numel() for layer in layers for parameter in layer.parameters()}
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    in_bits = [module for module in model.modules() if hasattr(module, BYTES)]
    return DryRun(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(trained),
        largest_parameter=max(trained),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        activations=counter.most_activations,
        with_gradients=counter.most + sum(4 * parameter.numel() for parameter in kept),
        input_shape=max(
            (tuple(x.shape) for x in batch.inputs.values()), key=lambda shape: (np.prod(shape), shape)
        ),
        quantization_savings=round(
            sum(module.weight.numel() * (4 - module.bytes_per_element) for module in in_bits)
        ),
        largest_layer=max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0),
        outside_layers=sum(parameter.numel() for parameter in model.parameters()) - sum(in_layers.values()),
    )


def _empty(tensor: Tensor, precision: torch.dtype | None = None) -> Tensor:
    """A tensor of the same shape without values, on the CPU. `precision`: of floating-point tensors."""
    dtype = precision if precision is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="cpu")


def _without_values(model: nn.Module, precision: torch.dtype | None) -> nn.Module:
    """A copy of the model whose parameters and buffers have no values. Call it inside FakeTensorMode."""
    copies: dict[int, Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        hollow = _empty(tensor, precision)
        if isinstance(tensor, nn.Parameter):
            hollow = nn.Parameter(hollow, requires_grad=tensor.requires_grad)
        copies[id(tensor)] = hollow
    hollow_model = copy.deepcopy(model, copies)  # takes its tensors from `copies`, so tied weights stay tied
    for module in hollow_model.modules():
        if hasattr(
            module, BYTES
        ):  # its weight is frozen: a linear layer saves nothing more for the backward pass
            module.__class__ = nn.Linear
    return hollow_model


def _empty_caches(model: nn.Module) -> None:
    """Clears every `lru_cache` in the modules of the model's classes (for example DINOv3's positions): it may
    hold tensors without values."""
    for name in {type(module).__module__ for module in model.modules()}:
        for function in [value for value in vars(sys.modules[name]).values() if callable(value)]:
            cells = function.__closure__ or () if isinstance(function, FunctionType) else ()
            for cached in (function, *(cell.cell_contents for cell in cells)):
                if isinstance(cached, _lru_cache_wrapper):
                    cached.cache_clear()


def _backward(loss: Tensor) -> None:
    """`loss.backward()` without its Python function, which disables torch function modes: checkpointed layers
    would be recomputed without `_GpuKernels`."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Counter(TorchDispatchMode):
    """Counts the bytes of live storages that operations allocated."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.most = self.most_activations = self._live = self._gradients = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
        self._sizes: dict[int, tuple[weakref.ref, int]] = {}
        self._finished: set[int] = set()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._finish)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.most = max(self.most, self._live)
        self.most_activations = max(self.most_activations, self._live - self._gradients)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return
        self._sizes[key] = (weakref.ref(storage, lambda _: self._free(key)), storage.nbytes())
        self._live += storage.nbytes()

    def _free(self, key: int) -> None:
        _, size = self._sizes.pop(key)
        self._live -= size
        if key in self._finished:
            self._finished.remove(key)
            self._gradients -= size

    def _finish(self, parameter: nn.Parameter) -> None:
        key = parameter.grad.untyped_storage()._cdata
        if key in self._sizes and key not in self._finished:
            self._finished.add(key)
            self._gradients += self._sizes[key][1]


class _GpuKernels(TorchFunctionMode):
    """Saves for the backward pass what a GPU's kernels save."""

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.autocast = autocast

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func in IN_FP32 and self.autocast and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return func(*map(_in_fp32, args), **{name: _in_fp32(value) for name, value in kwargs.items()})
        return func(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        if self.autocast and torch.is_autocast_enabled("cpu"):
            query, key, value = (x.to(self.autocast) for x in (query, key, value))
        # Kernels convert a boolean mask to the queries' dtype.
        mask = None if attn_mask is None else attn_mask.to(query.dtype)
        return _FusedAttention.apply(query, key, value, mask)

    @staticmethod
    def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.ops.aten.native_dropout(input, p, True)[0] if training and p > 0 else input


IN_FP32 = {functional.layer_norm, functional.softmax, functional.log_softmax, torch.softmax, Tensor.softmax}


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


class _FusedAttention(torch.autograd.Function):
    """Saves what FlashAttention (Dao et al., arXiv:2205.14135, section 3.1) and its relatives save: one
    number per query, no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(
            query, key, value, mask, out, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = ctx.saved_tensors
        return (*(torch.empty_like(x) for x in saved[:3]), None)
