"""Whether compiled FlexAttention does here what it should, found out before a run relies on it."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch

from finetune.kernels.bigbird.attention import BlockSparse
from finetune.kernels.bigbird.flex import TILE, Shape, attend, plans_of
from finetune.kernels.bigbird.plan import random_blocks, shortest_sparse
from finetune.kernels.bigbird.rows import read_rows
from finetune.kernels.row_lengths import known
from finetune.kernels.transfer import send

SHAPE = Shape(seeds=(0,), heads=2, number=1, block_size=TILE, positions=16 * TILE)
LENGTHS = (13 * TILE - 5, 11 * TILE, 3 * TILE + 1)
TWICE = (16 * TILE - 3, 2 * TILE)  # tokens of which 1024 are planned so that blocks are seen twice
CASES = ((LENGTHS, True), (LENGTHS, False), (TWICE, True))  # and whether it is training: a kernel each
WITHIN = 0.05  # of the largest element; bf16 is within 0.01


@functools.cache
def works(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether it compiles on `device` for heads of `size`, forward and backward, and computes what the gathered blocks give.

    Compilers, drivers and kernels for new chips have many versions; where they fail the gathered attention stays, with a
    warning. The kernels that are compiled for this small batch are those of every later one.
    """
    try:
        found = max(_difference(device, dtype, size, lengths, training) for lengths, training in CASES)
        reason = None if found <= WITHIN else f"it differs by {found:.1e} of the largest element"
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reason is not None:
        warnings.warn(f"FlexAttention is not used for BigBird ({dtype}, heads of {size}): {reason}", stacklevel=2)
    return reason is None


def _difference(device: torch.device, dtype: torch.dtype, size: int, lengths: tuple[int, ...], training: bool) -> float:
    """The greatest difference of contexts and gradients, as a share of the largest element of each."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError("triton is not installed")
    rows, width = len(lengths), -(-max(lengths) // TILE) * TILE
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, rows, width, SHAPE.heads, size, generator=generator).to(device, dtype)
    mask = torch.stack([torch.arange(width) < length for length in lengths]).to(device)
    # The first pass of a run asks, whatever it is: an evaluation, or one whose activations are to be computed again.
    apart = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with known(lengths), torch.inference_mode(False), torch.enable_grad(), apart:
        mask, inputs = mask.clone(), inputs.clone()
        found = read_rows(mask, SHAPE.block_size)
        plan = plans_of(mask, lengths, SHAPE)(0, training)
        shortest = shortest_sparse(SHAPE.number)
        drawn = [_table(blocks, device) if training and blocks >= shortest else None for blocks, _ in found.groups]
        results = []
        for gathered in (True, False):
            query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
            if gathered:
                context = BlockSparse.apply(query, key, value, found, drawn, SHAPE.block_size, SHAPE.number)
            else:
                context = attend(query, key, value, mask, plan)
            context.backward(inputs[3] * mask[..., None, None])
            results.append([context.detach(), query.grad, key.grad, value.grad])
    return max(float((x - y).abs().max() / y.abs().max()) for y, x in zip(*results, strict=True))


def _table(blocks: int, device: torch.device) -> torch.Tensor:
    sizes = {"heads": SHAPE.heads, "number": SHAPE.number, "block_size": TILE, "positions": SHAPE.positions}
    return send(torch.tensor(random_blocks(blocks=blocks, **sizes, seed=0)), device)
