"""Estimates the bytes per process from a dry run and a layout."""

from __future__ import annotations

from dataclasses import dataclass

from samerun.memory.dry_run import DryRun
from samerun.memory.layout import Layout

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
    (tests/samerun/memory/test_memory_estimate.py, docs/memory.md).
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
    gathered = (
        size * min(run.parameters, layout.live_parameters) if layout.stage == 3 and processes > 1 else 0
    )
    weights = (
        size * -(-run.parameters // processes) if layout.stage == 3 else size * run.parameters
    ) + run.buffers
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
    parts = ", ".join(f"{name} {_gib(getattr(e, name))}" for name in names)
    lines = [
        f"memory         about {_gib(e.peak)} GiB of tensors per {device}, for micro-batches of "
        f"{dry_run.input_size}",
        f"               ({parts}; not all at once)",
    ]
    if e.host:
        lines.append(f"               and {_gib(e.host)} GiB of host memory per process")
    return lines


def needed(estimate: Estimate) -> int:
    """The GPU memory in bytes that the estimate requires, fragmentation and `OUTSIDE_TENSORS` included."""
    return int(estimate.peak * (1 + FRAGMENTATION) + OUTSIDE_TENSORS)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
