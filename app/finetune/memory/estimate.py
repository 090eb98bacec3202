"""Bytes per process, from a dry run and a layout."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.memory.dry_run import DryRun
from finetune.memory.layout import Layout

GIB = 2**30
# What a GPU holds besides tensors: the CUDA context, the libraries' workspaces, NCCL's buffers. Assumed, not measured.
OUTSIDE_TENSORS = 1.5 * GIB
# What fragmentation makes unusable, as a share of the tensors.
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Estimate:
    """Bytes per process. `peak` is less than the sum of the parts where they do not exist at the same time."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    exchange: int  # communication buffers, copies for the update, weights gathered by ZeRO-3 and FSDP
    peak: int
    host: int  # host memory that offload needs; 0 without


def estimate(dry_run: DryRun, layout: Layout) -> Estimate:
    """What one process needs.

    Per trained parameter, mixed precision with Adam takes K = 12 bytes of optimizer state (fp32 weight and two moments) beside
    a weight and a gradient in half precision; ZeRO-1 divides the state by the number of processes, ZeRO-2 the gradients too,
    ZeRO-3 the weights too (Rajbhandari et al., arXiv:1910.02054, sections 3.1 and 5). Under autocast, and in fp32 without
    ZeRO, the weight itself is fp32, so that K is 8. Other optimizers keep `Layout.moments` in place of two moments. What the
    paper leaves out is read from DeepSpeed 0.19 and measured (tests/finetune/memory/test_memory_estimate.py, docs/memory.md):
    the reduction buckets, the copies of the gradients that an update works on, and that ZeRO-3 keeps
    `stage3_max_live_parameters` gathered weights (1e9 unless the file says otherwise), so that a smaller model is whole on
    every GPU while it computes.
    """
    if layout.fsdp is not None:
        return _sharded(dry_run, layout)
    return _replicated(dry_run, layout) if layout.stage == 0 else _partitioned(dry_run, layout)


def _replicated(run: DryRun, layout: Layout) -> Estimate:
    weights = 4 * run.parameters - run.saved + run.buffers
    gradients, optimizer = 4 * run.trainable, round(layout.moments * run.trainable)
    # DDP's buckets are the gradients; micro-batches without synchronisation gather them outside the buckets first.
    exchange = gradients if layout.wrapped and layout.accumulation > 1 else 0
    # In the first micro-batch of an unwrapped model, gradients are allocated while activations are freed.
    together = not layout.wrapped and layout.accumulation == 1
    backward = run.with_gradients if together else run.activations + gradients + exchange
    peak = weights + optimizer + max(backward, gradients + exchange)
    return Estimate(weights, gradients, optimizer, run.activations, exchange, peak, 0)


def _sharded(run: DryRun, layout: Layout) -> Estimate:
    """FSDP2: fp32 shards; the gathered weights of what lies outside of layers and of two layers, the second one being fetched
    into a buffer first; and a layer's gradients, in the precision of the gathered weights and copied to fp32 to be summed."""
    size, alone = 2 if layout.autocast else 4, layout.world_size == 1
    own = -(-run.trainable // layout.world_size)
    weights = 4 * -(-run.parameters // layout.world_size) + run.buffers
    gradients, optimizer = 4 * own, round(layout.moments * own)
    live = run.outside_layers + 3 * run.largest_layer if layout.fsdp.reshard_after_forward else run.parameters
    gathered = 0 if alone and size == 4 else size * min(run.parameters, live)
    largest = max(run.largest_layer, run.outside_layers)
    exchange = gathered + (size + 4) * min(largest, run.trainable)
    host = 0
    if layout.offload_parameters:
        host, weights, gradients, optimizer = weights - run.buffers + gradients + optimizer, run.buffers, 0, 0
    # In the first micro-batch, gradients come while activations go.
    backward = max(run.activations, gradients) if layout.accumulation == 1 else run.activations + gradients
    peak = weights + optimizer + backward + exchange
    return Estimate(weights, gradients, optimizer, run.activations, exchange, peak, host)


def _partitioned(run: DryRun, layout: Layout) -> Estimate:
    size, processes = 2 if layout.own_precision else 4, layout.world_size
    own = -(-run.trainable // processes)  # parameters that one process updates
    gathered = size * min(run.parameters, layout.live_parameters) if layout.stage == 3 and processes > 1 else 0
    weights = (size * -(-run.parameters // processes) if layout.stage == 3 else size * run.parameters) + run.buffers
    optimizer = round((4 + layout.moments) * own)
    buckets = layout.bucket * layout.buckets * size
    all_gradients, own_gradients, fp32_copy = size * run.trainable, size * own, 4 * own
    if layout.stage == 3:
        gradients, exchange = own_gradients, gathered + buckets
        phases = [run.activations + gradients + exchange, gradients + buckets + fp32_copy]
    else:
        gradients = all_gradients if layout.stage == 1 or layout.offload_optimizer else own_gradients
        # Measured: all gradients exist at the end of the backward pass, in stage 2 too.
        exchange = max(buckets, run.with_gradients - run.activations - gradients)
        accumulated = own_gradients if layout.accumulation > 1 and layout.stage == 2 else 0
        flat_copy = 0 if size == 4 else own_gradients
        if gradients == own_gradients:
            backward = run.activations + own_gradients + exchange - buckets
        else:
            backward = run.with_gradients if layout.accumulation == 1 else run.activations + all_gradients
        phases = [
            backward + buckets + accumulated,
            gradients + buckets + own_gradients + accumulated,
            own_gradients + flat_copy + fp32_copy,
        ]
    host = 0
    if layout.offload_optimizer:
        # The update happens in host memory, so the GPU has no copies for it.
        host, optimizer = optimizer + fp32_copy + (own_gradients if layout.stage < 3 else 0), 0
        phases = [phases[0] + 2 * size * run.largest]
        if layout.stage == 3:
            phases[0], host, gradients = phases[0] - gradients, host + gradients, 0
    if layout.offload_parameters:
        host, weights = host + weights - run.buffers, run.buffers
    return Estimate(weights, gradients, optimizer, run.activations, exchange, weights + optimizer + max(phases), host)


def memory_lines(dry_run: DryRun, layout: Layout) -> list[str]:
    """What a run prints about its memory before the first step."""
    e, device = estimate(dry_run, layout), "GPU" if layout.on_gpu else "process"
    names = ("weights", "gradients", "optimizer", "activations", *(["exchange"] if e.exchange else []))
    parts = ", ".join(f"{name} {_gib(getattr(e, name))}" for name in names)
    lines = [
        f"memory         about {_gib(e.peak)} GiB of tensors per {device}, for micro-batches of {dry_run.input_size}",
        f"               ({parts}; not all at once)",
    ]
    if e.host:
        lines.append(f"               and {_gib(e.host)} GiB of host memory per process")
    return lines


def needed(estimate: Estimate) -> int:
    """Bytes that a GPU must have: for the tensors, for fragmentation, and for everything that is not a tensor."""
    return int(estimate.peak * (1 + FRAGMENTATION) + OUTSIDE_TENSORS)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
