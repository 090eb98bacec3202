"""Memory of a training step: state by arithmetic, activations by a pass on tensors without values.

The dry run works for every architecture, attention and loss: it counts the tensors that are alive
(docs/memory.md).
"""

from __future__ import annotations

import copy
import random
import sys
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import _lru_cache_wrapper, partial
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
from torch.utils._pytree import tree_iter, tree_map_only

from samerun import deepspeed
from samerun.errors import TrainingError
from samerun.fsdp import layers_to_shard
from samerun.kernels.dropout import dropout_by_row, torch_attention, torch_dropout
from samerun.launch import Launch
from samerun.task import Batch, Task

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
GIB = 2**30
OUTSIDE_TENSORS = 1.5 * GIB  # CUDA context, workspaces of libraries, NCCL buffers. Assumed, not measured.
FRAGMENTATION = 0.05  # as a share of the tensors
# attribute of layers in 4 or 8 bits (samerun.models.quantized), which hold fp32 before training
BYTES = "bytes_per_element"
IN_FP32 = {functional.layer_norm, functional.softmax, functional.log_softmax, torch.softmax, Tensor.softmax}


@dataclass(frozen=True)
class Layout:
    """What determines a process's memory."""

    launch: Launch
    accumulation: int = 1  # micro-batches per optimizer step
    state_bytes: float = 8.0  # average bytes per trained element of optimizer state and --ema_decay

    @property
    def wrapped(self) -> bool:
        """Whether the model is in DistributedDataParallel, whose buckets keep gradients allocated."""
        return self.launch.world_size > 1 or self.launch.launcher in ("torchrun", "deepspeed")

    @property
    def offload_optimizer(self) -> bool:
        return self._offloads("optimizer")

    @property
    def offload_parameters(self) -> bool:
        return self.launch.zero_stage in (0, 3) and self._offloads("param")

    def _offloads(self, part: str) -> bool:
        if self.launch.fsdp is not None:
            return self.launch.fsdp.offload_params
        return deepspeed.offload_device(self.launch.deepspeed_config or {}, part) != "none"

    @property
    def own_precision(self) -> torch.dtype | None:
        """The half precision of DeepSpeed's weights and gradients, and of weights that FSDP gathers; None for
        fp32."""
        is_own = self.launch.zero_stage or self.launch.fsdp is not None
        return HALF.get(self.launch.precision) if is_own else None

    @property
    def autocast(self) -> torch.dtype | None:
        """The precision to which autocast casts fp32 weights in the forward pass; None without autocast."""
        return None if self.launch.zero_stage else HALF.get(self.launch.precision)


# The estimate


@dataclass(frozen=True)
class Estimate:
    """Bytes per process. The parts may peak at different times, so `peak` may be less than their sum."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    exchange: int  # communication buffers, copies for the update, weights gathered by ZeRO-3 and FSDP
    peak: int
    host: int = 0  # host memory for offload

    @property
    def needed(self) -> int:
        """GPU memory that it requires, fragmentation and `OUTSIDE_TENSORS` included."""
        return int(self.peak * (1 + FRAGMENTATION) + OUTSIDE_TENSORS)


def estimate(run: DryRun, layout: Layout) -> Estimate:
    """Estimates the memory of one process.

    Per trained parameter, mixed precision with Adam takes 12 bytes of optimizer state (fp32 weight and two
    moments), a weight and a gradient in half precision. ZeRO-1 partitions the state over the processes,
    ZeRO-2 also the gradients, ZeRO-3 also the weights (Rajbhandari et al., arXiv:1910.02054, sections 3.1 and
    5). Beyond the paper, the estimate covers reduction buckets, copies of gradients during an update, and
    gathered weights. These follow DeepSpeed 0.19's code and measurements (tests/samerun/test_memory.py).
    """
    if layout.launch.zero_stage:
        return _partitioned(run, layout)
    if layout.launch.fsdp is not None:
        return _sharded(run, layout)
    weights = 4 * run.parameters - run.quantization_savings + run.buffers
    gradients, optimizer = 4 * run.trainable, round(layout.state_bytes * run.trainable)
    # DDP's gradients are views of its buckets, but micro-batches without synchronisation accumulate outside
    # of them.
    exchange = gradients if layout.wrapped and layout.accumulation > 1 else 0
    # With a single micro-batch and no DDP, gradients are allocated while activations are freed.
    overlap = not layout.wrapped and layout.accumulation == 1
    backward = run.with_gradients if overlap else run.activations + gradients + exchange
    peak = weights + optimizer + max(backward, gradients + exchange)
    return Estimate(weights, gradients, optimizer, run.activations, exchange, peak)


def _sharded(run: DryRun, layout: Layout) -> Estimate:
    """FSDP2: fp32 shards; the gathered weights outside of layers, and those of two layers with a fetch buffer
    for the second; a layer's gradients, in the precision of the gathered weights and as an fp32 copy to
    reduce."""
    size, processes, fsdp = 2 if layout.autocast else 4, layout.launch.world_size, layout.launch.fsdp
    own = -(-run.trainable // processes)
    weights = 4 * -(-run.parameters // processes) + run.buffers
    gradients, optimizer = 4 * own, round(layout.state_bytes * own)
    host = 0
    live = run.outside_layers + 3 * run.largest_layer if fsdp.reshard_after_forward else run.parameters
    gathered = 0 if processes == 1 and size == 4 else size * min(run.parameters, live)
    largest = max(run.largest_layer, run.outside_layers)
    exchange = gathered + (size + 4) * min(largest, run.trainable)
    if layout.offload_parameters:
        host, weights, gradients, optimizer = weights - run.buffers + gradients + optimizer, run.buffers, 0, 0
    # With a single micro-batch, gradients are allocated while activations are freed.
    backward = max(run.activations, gradients) if layout.accumulation == 1 else run.activations + gradients
    peak = weights + optimizer + backward + exchange
    return Estimate(weights, gradients, optimizer, run.activations, exchange, peak, host)


def _partitioned(run: DryRun, layout: Layout) -> Estimate:
    """ZeRO, with DeepSpeed 0.19's defaults. In stage 3 up to `stage3_max_live_parameters` elements stay
    gathered, so a smaller model is whole in a pass."""
    size = 2 if layout.own_precision else 4
    processes, stage = layout.launch.world_size, layout.launch.zero_stage
    zero = layout.launch.deepspeed_config["zero_optimization"]
    bucket_size = zero.get("reduce_bucket_size", 500_000_000)
    bucket_size = deepspeed.BUCKETS["reduce_bucket_size"] if bucket_size == "auto" else int(bucket_size)
    buckets = bucket_size * size * (2 if stage < 3 and zero.get("overlap_comm") else 1)
    own = -(-run.trainable // processes)  # elements that one process updates
    weights = size * (-(-run.parameters // processes) if stage == 3 else run.parameters) + run.buffers
    optimizer = round((4 + layout.state_bytes) * own)
    all_gradients, own_gradients, fp32_copy = size * run.trainable, size * own, 4 * own
    host = 0
    if stage == 3:
        live = int(zero.get("stage3_max_live_parameters", 1_000_000_000))
        gathered = size * min(run.parameters, live) if processes > 1 else 0
        gradients, exchange = own_gradients, gathered + buckets
        phases = [run.activations + gradients + exchange, gradients + buckets + fp32_copy]
    else:
        gradients = all_gradients if stage == 1 or layout.offload_optimizer else own_gradients
        # Measured: all gradients exist at the end of the backward pass, even in stage 2.
        exchange = max(buckets, run.with_gradients - run.activations - gradients)
        accumulated = own_gradients if layout.accumulation > 1 and stage == 2 else 0
        flat_copy = 0 if size == 4 else own_gradients
        if gradients == own_gradients:
            backward = run.activations + own_gradients + exchange - buckets
        else:
            backward = run.with_gradients if layout.accumulation == 1 else run.activations + all_gradients
        phases = [  # backward pass, copy of the gradients, update
            backward + buckets + accumulated,
            gradients + buckets + own_gradients + accumulated,
            own_gradients + flat_copy + fp32_copy,
        ]
    if layout.offload_optimizer:
        # Updates run in host memory, so the GPU needs no copies for them.
        host, optimizer = optimizer + fp32_copy + (own_gradients if stage < 3 else 0), 0
        phases = [phases[0] + 2 * size * run.largest_parameter]
        if stage == 3:
            phases[0], host, gradients = phases[0] - gradients, host + gradients, 0
    if layout.offload_parameters:
        host, weights = host + weights - run.buffers, run.buffers
    peak = weights + optimizer + max(phases)
    return Estimate(weights, gradients, optimizer, run.activations, exchange, peak, host)


def memory_lines(run: DryRun, layout: Layout) -> list[str]:
    """The estimate as lines for the console."""
    e, device = estimate(run, layout), "process" if layout.launch.use_cpu else "GPU"
    names = ("weights", "gradients", "optimizer", "activations", *(["exchange"] if e.exchange else []))
    parts = ", ".join(f"{name} {getattr(e, name) / GIB:.2f}" for name in names)
    about = f"about {e.peak / GIB:.2f} GiB of tensors per {device}, for micro-batches of {run.input_size}"
    lines = [f"memory         {about}", f"               ({parts}; not all at once)"]
    host = f"               and {e.host / GIB:.2f} GiB of host memory per process"
    return [*lines, host] if e.host else lines


# The dry run


@dataclass(frozen=True)
class DryRun:
    """Sizes of a model, and peak memory of a forward and backward pass over one micro-batch."""

    parameters: int  # elements
    trainable: int  # elements of trained parameters
    largest_parameter: int  # elements of the largest trained parameter
    buffers: int  # bytes
    activations: int  # peak bytes without finished gradients of parameters
    with_gradients: int  # peak bytes with gradients of parameters
    input_size: str  # the shape of the largest input, as in 16x512
    quantization_savings: int = 0  # bytes that weights in 4 or 8 bits save compared with fp32
    largest_layer: int = 0  # elements of the largest layer that FSDP gathers on its own
    outside_layers: int = 0  # elements outside of these layers, which stay gathered during the pass
    # Not among the trained: the loss does not depend on them. Empty for a model that draws by numpy or
    # Python's `random`, which may leave out other layers in the next step.
    unused: frozenset[str] = frozenset()
    uncalled: frozenset[str] = frozenset()  # of `unused`, those of modules that were not called


def dry_run(model: nn.Module, task: Task, batch: Batch, layout: Layout) -> DryRun:
    """Runs a forward and backward pass of `model` on tensors without values and counts live bytes.

    `model`: any module before `prepare`, on any device, `meta` included; it is not changed, and its values
    are not copied. The precision is that of `layout`. On a CPU the result matches the allocator within
    kilobytes (docs/memory.md). For GPUs see `_GpuKernels`. Raises any exception of a model whose forward pass
    reads values.
    """
    drawn = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([]), FakeTensorMode(allow_non_fake_inputs=True):
            # `deepcopy` takes tensors from here, so tied weights stay tied.
            hollow_tensors = {id(x): _empty(x, layout) for x in [*model.parameters(), *model.buffers()]}
            hollow = copy.deepcopy(model, hollow_tensors).train()
            for module in hollow.modules():
                if hasattr(module, BYTES):  # frozen: a linear layer saves nothing more for the backward pass
                    module.__class__ = nn.Linear
            if layout.autocast is not None:  # like Accelerate
                autocast = torch.autocast("cpu", dtype=layout.autocast)
                hollow.forward = convert_outputs_to_fp32(autocast(hollow.forward))
            inputs = {name: _empty(tensor, layout) for name, tensor in batch.inputs.items()}
            called: set[str] = set()
            for name, module in hollow.named_modules():
                module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
            labels = None if batch.labels is None else torch.empty_like(batch.labels, device="cpu")
            hollow_batch = replace(batch, rows=torch.empty_like(batch.rows), inputs=inputs, labels=labels)
            kernels = nullcontext() if layout.launch.use_cpu else _GpuKernels(layout.autocast)
            with _Counter(hollow) as counter, kernels, dropout_by_row(batch.lengths, batch.places):
                loss = task.loss_sum(hollow, hollow_batch)
                # `loss.backward()` would disable `_GpuKernels` for checkpointed layers, which it recomputes.
                torch.autograd.Variable._execution_engine.run_backward(
                    (loss,), (torch.ones_like(loss),), False, False, (), True, True
                )
    finally:
        _empty_caches(model)
        draws = random.getstate() != drawn[0] or str(np.random.get_state()) != str(drawn[1])
        random.setstate(drawn[0])  # only rank 0 comes here
        np.random.set_state(drawn[1])
    unused = frozenset(() if draws else counter.without_gradient)
    layers = [] if layout.launch.fsdp is None else layers_to_shard(model, layout.launch.fsdp)
    in_layers = {parameter: parameter.numel() for layer in layers for parameter in layer.parameters()}
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = [p.numel() for name, p in model.named_parameters() if p.requires_grad and name not in unused]
    in_bits = [module for module in model.modules() if hasattr(module, BYTES)]
    return DryRun(
        parameters=total,
        trainable=sum(trained),
        largest_parameter=max(trained),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        activations=counter.most_activations,
        with_gradients=counter.most,
        input_size="x".join(map(str, batch.shape)),
        quantization_savings=round(sum(m.weight.numel() * (4 - m.bytes_per_element) for m in in_bits)),
        largest_layer=max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0),
        outside_layers=total - sum(in_layers.values()),
        unused=unused,
        uncalled=frozenset(name for name in unused if name.rpartition(".")[0] not in called),
    )


def freeze_unused(model: nn.Module, passed: DryRun) -> None:
    """Freezes the parameters that the loss does not depend on: DDP refuses parameters without gradients, ZeRO
    would let them decay. A module of theirs that the dry run did not call raises `TrainingError` if a later
    batch does call it: training would leave it as it is without a word."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in passed.unused)
    for name in passed.uncalled:
        model.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(partial(_refuse_call, name))


def _refuse_call(name: str, module: nn.Module, args: Any) -> None:
    if module.training:
        raise TrainingError(
            f"this batch uses {name}, which was frozen, as the largest batch does not. Let each batch use "
            "the same weights, for example by adding 0 times the sum of the others to the loss"
        )


def _empty(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor of the same shape without values, on the CPU, in the precision of the layout."""
    dtype = (layout.own_precision or tensor.dtype) if tensor.is_floating_point() else tensor.dtype
    empty = torch.empty(tensor.shape, dtype=dtype, device="cpu")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty


def _empty_caches(model: nn.Module) -> None:
    """Clears every `lru_cache` in the modules of the model's classes (for example DINOv3's positions): it may
    hold tensors without values."""
    for name in {type(module).__module__ for module in model.modules()}:
        for function in [value for value in vars(sys.modules[name]).values() if callable(value)]:
            cells = function.__closure__ or () if isinstance(function, FunctionType) else ()
            for cached in (function, *(cell.cell_contents for cell in cells)):
                if isinstance(cached, _lru_cache_wrapper):
                    cached.cache_clear()


class _Counter(TorchDispatchMode):
    """Counts the bytes of live storages that operations allocated."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.most = self.most_activations = self._live = self._gradients = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
        self._sizes: dict[int, tuple[weakref.ref, int]] = {}
        self._finished: set[int] = set()  # storages of finished gradients
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.without_gradient = set(trained)  # names
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(partial(self._finish, name))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._sizes and key not in self._known:
                    self._sizes[key] = weakref.ref(storage, lambda _, key=key: self._free(key)), size
                    self._live += size
        self.most = max(self.most, self._live)
        self.most_activations = max(self.most_activations, self._live - self._gradients)
        return result

    def _free(self, key: int) -> None:
        _, size = self._sizes.pop(key)
        self._live -= size
        if key in self._finished:
            self._finished.remove(key)
            self._gradients -= size

    def _finish(self, name: str, parameter: nn.Parameter) -> None:
        self.without_gradient.discard(name)
        key = parameter.grad.untyped_storage()._cdata
        if key in self._sizes and key not in self._finished:
            self._finished.add(key)
            self._gradients += self._sizes[key][1]


class _GpuKernels(TorchFunctionMode):
    """Saves for the backward pass what a GPU's kernels save: a byte per element for dropout, fp32 for
    normalisation under autocast, and of attention one number per query, as FlashAttention (Dao et al.,
    arXiv:2205.14135, section 3.1) and torch's kernel for CPUs do; the latter only without dropout."""

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.autocast = autocast

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch_attention:
            return func(*args[:4], **{**kwargs, "dropout_p": 0.0})
        if func is torch_dropout:
            return _dropout(*args, **kwargs)
        if func not in IN_FP32 or not self.autocast or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            given = (args, kwargs)
            args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, given)
            return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.ops.aten.native_dropout(input, p, True)[0] if training and p > 0 else input
