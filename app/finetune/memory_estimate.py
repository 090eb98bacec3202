"""How much memory a training step takes, before it is taken. Level 4.

Weights, gradients and optimizer states follow from their number and from the launch. Activations are not guessed from the
model's dimensions: one forward and backward pass is rehearsed on tensors that have shapes and no values (torch's FakeTensor),
and what is alive at its worst moment is counted. That holds for every architecture, attention, loss and for recomputation.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from finetune.kernels.embeddings import keep_gradients
from finetune.kernels.row_lengths import known
from finetune.launching import zero
from finetune.plan import BatchShape
from finetune.task import Batch, Task
from finetune.training.batches import TrainSteps

GIB = 2**30
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
# What a GPU holds besides tensors: the CUDA context, the libraries' workspaces, NCCL's buffers. Not measured here.
OUTSIDE_TENSORS = 1.5 * GIB
# What the allocator cannot hand out for being cut into pieces, as a share of the tensors.
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Layout:
    """What decides how a model's state is laid out over processes and devices."""

    world_size: int
    precision: str  # no, fp16, bf16
    on_gpu: bool
    accumulation: int  # forward passes per optimizer step
    wrapped: bool  # in DistributedDataParallel, which keeps gradients from step to step
    stage: int = 0  # of ZeRO; 0: every process has everything
    offload_optimizer: bool = False
    offload_parameters: bool = False
    bucket: int = 0  # numbers that ZeRO reduces at once
    buckets: int = 1  # how many such buffers there are
    live_parameters: int = 0  # how many gathered weights ZeRO-3 keeps

    @property
    def keeps_embeddings(self) -> bool:
        """Whether gradients of large embeddings are kept from step to step (`finetune.kernels.embeddings`)."""
        return not self.on_gpu and not self.wrapped and self.stage == 0

    @property
    def own_precision(self) -> torch.dtype | None:
        """The half precision that DeepSpeed keeps weights and gradients in; None where they are fp32."""
        return HALF.get(self.precision) if self.stage else None

    @property
    def autocast(self) -> torch.dtype | None:
        """The precision that fp32 weights are cast to in the forward pass; None where they are not."""
        return None if self.stage else HALF.get(self.precision)


@dataclass(frozen=True)
class Rehearsal:
    """What one forward and backward pass over a micro-batch takes besides weights; numbers and bytes."""

    weights: int  # numbers in parameters
    trainable: int  # of these, numbers that are trained
    largest: int  # numbers in the largest trainable parameter
    buffers: int  # bytes
    activations: int  # bytes at the worst moment, finished gradients of weights left out
    with_gradients: int  # bytes at the worst moment, gradients of weights counted as they come
    shape: tuple[int, ...]  # of the largest input


@dataclass(frozen=True)
class Estimate:
    """Bytes of one process. `peak` is less than the sum of the parts where they are not all there at once."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    exchange: int  # buffers of the communication, copies for the update, weights gathered by ZeRO-3
    peak: int
    host: int  # in host memory, by offload; 0 without


def layout_of(launch: Any, batch: BatchShape) -> Layout:
    """The layout that a `launch.Launch` asks for."""
    wrapped = launch.world_size > 1 or launch.launcher in ("torchrun", "deepspeed")
    plain = Layout(launch.world_size, launch.precision, not launch.use_cpu, batch.accumulation, wrapped)
    return plain if launch.deepspeed_config is None else with_zero(plain, launch.deepspeed_config)


def with_zero(layout: Layout, config: dict[str, Any]) -> Layout:
    """The same under a DeepSpeed file; where it is silent, what DeepSpeed 0.19 does."""
    section = config["zero_optimization"]
    stage = zero.stage_of(config)
    bucket = section.get("reduce_bucket_size", 500_000_000)
    overlaps = section.get("overlap_comm", stage == 3)
    return replace(
        layout,
        stage=stage,
        offload_optimizer=_leaves_the_gpu(section, "offload_optimizer"),
        offload_parameters=stage == 3 and _leaves_the_gpu(section, "offload_param"),
        bucket=zero.BUCKETS["reduce_bucket_size"] if bucket == "auto" else int(bucket),
        buckets=2 if overlaps and stage < 3 else 1,
        live_parameters=int(section.get("stage3_max_live_parameters", 1_000_000_000)),
    )


def estimate(rehearsal: Rehearsal, layout: Layout) -> Estimate:
    """What one process needs.

    Per trainable number, mixed precision with Adam takes K = 12 bytes of optimizer state (fp32 weight and two moments) beside
    a weight and a gradient in half precision; ZeRO-1 divides the state by the number of processes, ZeRO-2 the gradients too,
    ZeRO-3 the weights too (Rajbhandari et al., arXiv:1910.02054, sections 3.1 and 5). Under autocast, and in fp32 without
    ZeRO, the weight itself is fp32, so that K is 8. What the paper leaves out is read from DeepSpeed 0.19 and measured
    (tests/finetune/test_memory.py, README): the buckets of the reduction, the copies of the gradients that an update works
    on, and that ZeRO-3 keeps `stage3_max_live_parameters` gathered weights (1e9 unless the file says otherwise), so that a
    smaller model is whole on every GPU while it computes.
    """
    return _replicated(rehearsal, layout) if layout.stage == 0 else _partitioned(rehearsal, layout)


def _replicated(r: Rehearsal, layout: Layout) -> Estimate:
    weights, optimizer = 4 * r.weights + r.buffers, 8 * r.trainable
    one = 4 * r.trainable
    # DDP's buckets are the gradients; passes without synchronisation gather them outside the buckets first.
    exchange = one if layout.wrapped and layout.accumulation > 1 else 0
    # Gradients that come during the first pass do not meet all of its activations.
    at_once = not layout.wrapped and layout.accumulation == 1
    passing = r.with_gradients if at_once else r.activations + one + exchange
    peak = weights + optimizer + max(passing, one + exchange)
    return Estimate(weights, one, optimizer, r.activations, exchange, peak, 0)


def _partitioned(r: Rehearsal, layout: Layout) -> Estimate:
    size, share = 2 if layout.own_precision else 4, layout.world_size
    own = -(-r.trainable // share)  # numbers that one process updates
    gathered = size * min(r.weights, layout.live_parameters) if layout.stage == 3 and share > 1 else 0
    weights = (size * -(-r.weights // share) if layout.stage == 3 else size * r.weights) + r.buffers
    optimizer = 12 * own
    buckets = layout.bucket * layout.buckets * size
    whole, kept = size * r.trainable, size * own
    fp32_copy = 4 * own
    if layout.stage == 3:
        gradients, exchange = kept, gathered + buckets
        phases = [r.activations + gradients + exchange, gradients + buckets + fp32_copy]
    else:
        gradients = whole if layout.stage == 1 or layout.offload_optimizer else kept
        # Measured: all gradients are there at the end of the backward pass, in stage 2 too.
        exchange = max(buckets, r.with_gradients - r.activations - gradients)
        before = kept if layout.accumulation > 1 and layout.stage == 2 else 0  # from the passes before
        flat = 0 if size == 4 else kept
        if gradients == kept:
            passing = r.activations + kept + exchange - buckets
        else:
            passing = r.with_gradients if layout.accumulation == 1 else r.activations + whole
        phases = [passing + buckets + before, gradients + buckets + kept + before, kept + flat + fp32_copy]
    host = 0
    if layout.offload_optimizer:
        # The update happens in host memory, so the GPU has no copies for it.
        host, optimizer = optimizer + fp32_copy + (kept if layout.stage < 3 else 0), 0
        phases = [phases[0] + 2 * size * r.largest]
        if layout.stage == 3:
            phases[0], host, gradients = phases[0] - gradients, host + gradients, 0
    if layout.offload_parameters:
        host, weights = host + weights - r.buffers, r.buffers
    return Estimate(weights, gradients, optimizer, r.activations, exchange, weights + optimizer + max(phases), host)


def _leaves_the_gpu(section: dict[str, Any], key: str) -> bool:
    return section.get(key, {}).get("device", "none") not in ("none", None)


# The rehearsal --------------------------------------------------------------------------------------------------------


def largest_batch(steps: TrainSteps) -> Batch:
    """A micro-batch as large as any of the run: as many rows as one may have, the longest of the file."""
    batch, size = steps.plan.batch, min(steps.plan.batch.micro_batch_size, len(steps.lengths))
    if batch.max_tokens is not None:
        size = min(size, max(1, batch.max_tokens // int(steps.widths.max())))
    longest = np.argpartition(-steps.lengths, size - 1)[:size]
    return steps.collate(longest[np.argsort(-steps.lengths[longest], kind="stable")])


def rehearse(model: nn.Module, task: Task, batch: Batch, layout: Layout) -> Rehearsal:
    """Does a forward and backward pass of `model` on tensors without values and counts what is alive.

    `model`: the model before it is prepared, on any device, `meta` included; it is neither changed nor copied. Its weights
    take the precision that `layout` gives them, and kernels are those of a GPU or of a CPU as `layout` says: on a CPU the
    count is that of the allocator but for a few kilobytes (README); on a GPU attention is fused, dropout keeps a byte per
    number, and autocast normalises in fp32. Raises whatever a model raises that looks at values in its forward pass.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = torch.get_rng_state()
    try:
        with mode:
            double = _without_values(model, layout.own_precision)
            double.train()
            labels = None if batch.labels is None else _empty(batch.labels)
            precision = layout.own_precision  # of floating-point inputs, as `training.step` casts them
            inputs = {name: _empty(x, precision if x.is_floating_point() else None) for name, x in batch.inputs.items()}
            shapes = Batch(_empty(batch.rows), inputs, labels, batch.lengths)
            kept = keep_gradients(double) if layout.keeps_embeddings else []
            for weight in kept:
                weight.grad = torch.zeros_like(weight)  # by an earlier step
            kernels = _GpuKernels(layout.autocast) if layout.on_gpu else nullcontext()
            with _Counter(double) as counter, kernels, known(batch.lengths):
                _backward(task.loss_sum(_forward(double, layout.autocast), shapes))
    finally:
        torch.set_rng_state(state)
    numbers = [parameter.numel() for parameter in model.parameters()]
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    size = max((tuple(x.shape) for x in batch.inputs.values()), key=lambda shape: (np.prod(shape), shape))
    return Rehearsal(
        weights=sum(numbers),
        trainable=sum(trained),
        largest=max(trained),
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        activations=counter.most_activations,
        with_gradients=counter.most + sum(4 * weight.numel() for weight in kept),
        shape=size,
    )


def _empty(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu")


def _without_values(model: nn.Module, precision: torch.dtype | None) -> nn.Module:
    """A copy of the model's structure whose parameters and buffers have no values; called in the mode that makes it so."""
    known: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        double = _empty(tensor, precision if tensor.is_floating_point() else None)
        if isinstance(tensor, nn.Parameter):
            double = nn.Parameter(double, requires_grad=tensor.requires_grad)
        known[id(tensor)] = double
    return copy.deepcopy(model, known)  # finds what it would copy in `known`, tied weights as one


def _forward(model: nn.Module, autocast: torch.dtype | None) -> Callable[..., Any]:
    """The forward pass as Accelerate wraps it."""
    if autocast is None:
        return model
    from accelerate.utils import convert_to_fp32

    def forward(*inputs: Any, **named: Any) -> Any:
        with torch.autocast("cpu", dtype=autocast):
            outputs = model(*inputs, **named)
        return convert_to_fp32(outputs)

    return forward


def _backward(loss: Tensor) -> None:
    """loss.backward(), which as a function that modes see would switch them off for all that happens in it: a forward pass
    that is computed again would use other kernels than the first time."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Counter(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, until they are freed."""

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
    """What a GPU's kernels keep where a CPU's keep something else."""

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
        # Kernels add a mask of the queries' type; one of booleans is made into that.
        mask = None if attn_mask is None else attn_mask.to(query.dtype)
        return _FusedAttention.apply(query, key, value, mask)

    @staticmethod
    def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.ops.aten.native_dropout(input, p, True)[0] if training and p > 0 else input


IN_FP32 = {functional.layer_norm, functional.softmax, functional.log_softmax, torch.softmax, Tensor.softmax}


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


class _FusedAttention(torch.autograd.Function):
    """What FlashAttention (Dao et al., arXiv:2205.14135, section 3.1) and its relatives keep: no scores, one number a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, mask, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = ctx.saved_tensors
        return (*(torch.empty_like(x) for x in saved[:3]), None)


# In words --------------------------------------------------------------------------------------------------------------


def memory_lines(rehearsal: Rehearsal, layout: Layout) -> list[str]:
    """What a run says of its memory before the first step."""
    e, device = estimate(rehearsal, layout), "GPU" if layout.on_gpu else "process"
    parts = [f"weights {_gib(e.weights)}", f"gradients {_gib(e.gradients)}", f"optimizer {_gib(e.optimizer)}"]
    parts.append(f"activations {_gib(e.activations)}")
    parts += [f"exchange {_gib(e.exchange)}"] if e.exchange else []
    shape = "x".join(map(str, rehearsal.shape))
    lines = [
        f"memory         about {_gib(e.peak)} GiB of tensors per {device}, in passes over {shape} tokens",
        f"               ({', '.join(parts)}; not all at once)",
    ]
    if e.host:
        lines.append(f"               and {_gib(e.host)} GiB of host memory per process")
    return lines


def needed(estimate: Estimate) -> int:
    """Bytes that a GPU must have for an estimate: its tensors, what the allocator loses, and what is no tensor."""
    return int(estimate.peak * (1 + FRAGMENTATION) + OUTSIDE_TENSORS)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
