"""Memory of a training step: state by arithmetic, activations by a pass on tensors without values.

It covers any module and input, DDP, ZeRO with offload, FSDP, autocast and gradient checkpointing
(docs/memory.md): the dry run works for every architecture, attention and loss, because it counts the tensors
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

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from samerun import deepspeed
from samerun.fsdp import FsdpSettings, layers_to_shard
from samerun.kernels.dropout import dropout_by_row, torch_attention, torch_dropout
from samerun.plan import BatchShape
from samerun.task import Batch, Task

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """The properties of a launch that determine a process's memory."""

    world_size: int
    precision: str  # no, fp16, bf16
    on_gpu: bool
    accumulation: int  # micro-batches per optimizer step
    wrapped: bool  # in DistributedDataParallel, whose buckets keep gradients allocated
    stage: int = 0  # of ZeRO; 0: without
    offload_optimizer: bool = False
    offload_parameters: bool = False
    bucket_size: int = 0  # elements of a reduction bucket of ZeRO
    num_buckets: int = 1
    live_parameters: int = 0  # elements that ZeRO-3 keeps gathered
    state_bytes: float = 8.0  # average bytes per trained element of optimizer state and --ema_decay
    fsdp: FsdpSettings | None = None

    @property
    def own_precision(self) -> torch.dtype | None:
        """The half precision of DeepSpeed's weights and gradients, and of weights that FSDP gathers; None for
        fp32."""
        return HALF.get(self.precision) if self.stage or self.fsdp is not None else None

    @property
    def autocast(self) -> torch.dtype | None:
        """The precision to which autocast casts fp32 weights in the forward pass; None without autocast."""
        return None if self.stage else HALF.get(self.precision)


def layout_of(launch: Any, batch: BatchShape, state_bytes: float = 8.0) -> Layout:
    """The layout of a `runtime.Launch`. `state_bytes`: as in `Layout`."""
    wrapped = launch.world_size > 1 or launch.launcher in ("torchrun", "deepspeed")
    step = not launch.use_cpu, batch.accumulation, wrapped
    plain = Layout(launch.world_size, launch.precision, *step, state_bytes=state_bytes)
    if launch.fsdp is not None:
        return with_fsdp(plain, launch.fsdp)
    return plain if launch.deepspeed_config is None else with_zero(plain, launch.deepspeed_config)


def with_fsdp(layout: Layout, settings: FsdpSettings) -> Layout:
    """The layout under FSDP2."""
    offloads = settings.offload_params
    return replace(layout, fsdp=settings, offload_optimizer=offloads, offload_parameters=offloads)


def with_zero(layout: Layout, config: dict[str, Any]) -> Layout:
    """The layout under a DeepSpeed configuration; missing values are DeepSpeed 0.19's defaults."""
    section = config["zero_optimization"]
    stage = deepspeed.stage_of(config)
    bucket_size = section.get("reduce_bucket_size", 500_000_000)
    overlaps = section.get("overlap_comm", stage == 3)
    return replace(
        layout,
        stage=stage,
        offload_optimizer=_leaves_the_gpu(section, "offload_optimizer"),
        offload_parameters=stage == 3 and _leaves_the_gpu(section, "offload_param"),
        bucket_size=deepspeed.BUCKETS["reduce_bucket_size"] if bucket_size == "auto" else int(bucket_size),
        num_buckets=2 if overlaps and stage < 3 else 1,
        live_parameters=int(section.get("stage3_max_live_parameters", 1_000_000_000)),
    )


def _leaves_the_gpu(section: dict[str, Any], key: str) -> bool:
    return (section.get(key) or {}).get("device", "none") not in ("none", None)


# The estimate


GIB = 2**30
OUTSIDE_TENSORS = 1.5 * GIB  # CUDA context, workspaces of libraries, NCCL buffers. Assumed, not measured.
FRAGMENTATION = 0.05  # as a share of the tensors


@dataclass(frozen=True)
class Estimate:
    """Bytes per process. The parts may peak at different times, so `peak` may be less than their sum."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    exchange: int  # communication buffers, copies for the update, weights gathered by ZeRO-3 and FSDP
    peak: int
    host: int  # host memory for offload


def estimate(dry_run: DryRun, layout: Layout) -> Estimate:
    """Estimates the memory of one process.

    Per trained parameter, mixed precision with Adam takes K = 12 bytes of optimizer state (fp32 weight and
    two moments), a weight and a gradient in half precision. ZeRO-1 partitions the state over the processes,
    ZeRO-2 also the gradients, ZeRO-3 also the weights (Rajbhandari et al., arXiv:1910.02054, sections 3.1 and
    5). Under autocast, and in fp32 without ZeRO, the weight is fp32 already, so K is 8. For other optimizers,
    `Layout.state_bytes` replaces the two moments.

    Beyond the paper, the estimate covers reduction buckets, copies of gradients during an update, and the
    weights that ZeRO-3 keeps gathered: up to `stage3_max_live_parameters` (default 1e9), so a smaller model
    is whole on every GPU in a pass. These follow DeepSpeed 0.19's code and measurements
    (tests/samerun/test_memory.py, docs/memory.md).
    """
    if layout.fsdp is not None:
        return _sharded(dry_run, layout)
    return _replicated(dry_run, layout) if layout.stage == 0 else _partitioned(dry_run, layout)


def _replicated(run: DryRun, layout: Layout) -> Estimate:
    weights = 4 * run.parameters - run.quantization_savings + run.buffers
    gradients, optimizer = 4 * run.trainable, round(layout.state_bytes * run.trainable)
    # DDP's gradients are views of its buckets, but micro-batches without synchronisation accumulate outside
    # of them.
    exchange = gradients if layout.wrapped and layout.accumulation > 1 else 0
    # With a single micro-batch and no DDP, gradients are allocated while activations are freed.
    overlap = not layout.wrapped and layout.accumulation == 1
    backward = run.with_gradients if overlap else run.activations + gradients + exchange
    peak = weights + optimizer + max(backward, gradients + exchange)
    return Estimate(weights, gradients, optimizer, run.activations, exchange, peak, 0)


def _sharded(run: DryRun, layout: Layout) -> Estimate:
    """FSDP2: fp32 shards; the gathered weights outside of layers, and those of two layers with a fetch buffer
    for the second; a layer's gradients, in the precision of the gathered weights and as an fp32 copy to
    reduce."""
    size, alone = 2 if layout.autocast else 4, layout.world_size == 1
    own = -(-run.trainable // layout.world_size)
    weights = 4 * -(-run.parameters // layout.world_size) + run.buffers
    gradients, optimizer = 4 * own, round(layout.state_bytes * own)
    live = run.outside_layers + 3 * run.largest_layer if layout.fsdp.reshard_after_forward else run.parameters
    gathered = 0 if alone and size == 4 else size * min(run.parameters, live)
    largest = max(run.largest_layer, run.outside_layers)
    exchange = gathered + (size + 4) * min(largest, run.trainable)
    host = 0
    if layout.offload_parameters:
        host, weights, gradients, optimizer = weights - run.buffers + gradients + optimizer, run.buffers, 0, 0
    # With a single micro-batch, gradients are allocated while activations are freed.
    backward = max(run.activations, gradients) if layout.accumulation == 1 else run.activations + gradients
    peak = weights + optimizer + backward + exchange
    return Estimate(weights, gradients, optimizer, run.activations, exchange, peak, host)


def _partitioned(run: DryRun, layout: Layout) -> Estimate:
    size, processes = 2 if layout.own_precision else 4, layout.world_size
    own = -(-run.trainable // processes)  # elements that one process updates
    gathered = size * min(run.parameters, layout.live_parameters) if processes > 1 else 0
    weights = size * (-(-run.parameters // processes) if layout.stage == 3 else run.parameters) + run.buffers
    optimizer = round((4 + layout.state_bytes) * own)
    buckets = layout.bucket_size * layout.num_buckets * size
    all_gradients, own_gradients, fp32_copy = size * run.trainable, size * own, 4 * own
    if layout.stage == 3:
        gradients, exchange = own_gradients, gathered + buckets
        phases = [run.activations + gradients + exchange, gradients + buckets + fp32_copy]
    else:
        gradients = all_gradients if layout.stage == 1 or layout.offload_optimizer else own_gradients
        # Measured: all gradients exist at the end of the backward pass, even in stage 2.
        exchange = max(buckets, run.with_gradients - run.activations - gradients)
        accumulated = own_gradients if layout.accumulation > 1 and layout.stage == 2 else 0
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
    host = 0
    if layout.offload_optimizer:
        # Updates run in host memory, so the GPU needs no copies for them.
        host, optimizer = optimizer + fp32_copy + (own_gradients if layout.stage < 3 else 0), 0
        phases = [phases[0] + 2 * size * run.largest_parameter]
        if layout.stage == 3:
            phases[0], host, gradients = phases[0] - gradients, host + gradients, 0
    if layout.offload_parameters:
        host, weights = host + weights - run.buffers, run.buffers
    return Estimate(
        weights, gradients, optimizer, run.activations, exchange, weights + optimizer + max(phases), host
    )


def memory_lines(dry_run: DryRun, layout: Layout) -> list[str]:
    """The estimate as lines for the console."""
    e, device = estimate(dry_run, layout), "GPU" if layout.on_gpu else "process"
    names = ("weights", "gradients", "optimizer", "activations", *(["exchange"] if e.exchange else []))
    parts = ", ".join(f"{name} {getattr(e, name) / GIB:.2f}" for name in names)
    lines = [
        f"memory         about {e.peak / GIB:.2f} GiB of tensors per {device}, for micro-batches of "
        f"{dry_run.input_size}",
        f"               ({parts}; not all at once)",
    ]
    if e.host:
        lines.append(f"               and {e.host / GIB:.2f} GiB of host memory per process")
    return lines


def needed(estimate: Estimate) -> int:
    """The GPU memory in bytes that the estimate requires, fragmentation and `OUTSIDE_TENSORS` included."""
    return int(estimate.peak * (1 + FRAGMENTATION) + OUTSIDE_TENSORS)


# The dry run

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
    input_size: str  # the shape of the largest input, as in 16x512
    quantization_savings: int = 0  # bytes that weights in 4 or 8 bits save compared with fp32
    largest_layer: int = 0  # elements of the largest layer that FSDP gathers on its own
    outside_layers: int = 0  # elements outside of these layers, which stay gathered during the pass


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
            hollow_batch = replace(batch, rows=_empty(batch.rows), inputs=inputs, labels=labels)
            kernels = _GpuKernels(layout.autocast) if layout.on_gpu else nullcontext()
            with _Counter(hollow) as counter, kernels, dropout_by_row(batch.lengths, batch.places):
                _backward(task.loss_sum(hollow, hollow_batch))
    finally:
        torch.set_rng_state(rng_state)
        _empty_caches(model)
    layers = [] if layout.fsdp is None else layers_to_shard(model, layout.fsdp)
    in_layers = {parameter: parameter.numel() for layer in layers for parameter in layer.parameters()}
    all_parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    in_bits = [module for module in model.modules() if hasattr(module, BYTES)]
    return DryRun(
        parameters=all_parameters,
        trainable=sum(trained),
        largest_parameter=max(trained),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        activations=counter.most_activations,
        with_gradients=counter.most,
        input_size="x".join(map(str, batch.shape)),
        quantization_savings=round(
            sum(module.weight.numel() * (4 - module.bytes_per_element) for module in in_bits)
        ),
        largest_layer=max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0),
        outside_layers=all_parameters - sum(in_layers.values()),
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
        if hasattr(module, BYTES):  # frozen: a linear layer saves nothing more for the backward pass
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
        if func is torch_attention:
            return self._attention(*args, **kwargs)
        if func is torch_dropout:
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
