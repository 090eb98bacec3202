"""Whether compiled FlexAttention computes here what the gathered blocks compute, found out before a run relies on it."""

from __future__ import annotations

import functools
import importlib.util

import torch

from finetune.kernels.bigbird.attention import BlockSparse
from finetune.kernels.bigbird.flex import TILE, Plans, attend
from finetune.kernels.bigbird.plan import Shape
from finetune.kernels.bigbird.rows import draw_blocks, read_rows
from finetune.kernels.row_lengths import row_lengths
from finetune.kernels.self_test import compare, passes, with_gradients

SHAPE = Shape(seeds=(0,), heads=2, number=1, block_size=TILE, positions=16 * TILE)
LENGTHS = (13 * TILE - 5, 11 * TILE, 3 * TILE + 1)
TWICE = (16 * TILE - 3, 2 * TILE)  # tokens of which 1024 are planned so that blocks are seen twice
CASES = ((LENGTHS, True), (LENGTHS, False), (TWICE, True))  # and whether it is training: a kernel each


@functools.cache
def works(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether it compiles on `device` for heads of `size`, forward and backward, and is right. What is compiled for this small
    batch serves every later one."""
    return passes(lambda: _problem(device, dtype, size), f"FlexAttention is not used for BigBird ({dtype}, heads of {size})")


def _problem(device: torch.device, dtype: torch.dtype, size: int) -> str | None:
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError("triton is not installed")
    # The first pass of a run asks, whatever it is: an evaluation, or one whose activations are to be computed again.
    apart = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with torch.inference_mode(False), torch.enable_grad(), apart:
        problems = (_difference(device, dtype, size, lengths, training) for lengths, training in CASES)
        return next(filter(None, problems), None)


def _difference(device: torch.device, dtype: torch.dtype, size: int, lengths: tuple[int, ...], training: bool) -> str | None:
    width = -(-max(lengths) // TILE) * TILE
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, len(lengths), width, SHAPE.heads, size, generator=generator).to(device, dtype)
    mask = torch.stack([torch.arange(width) < length for length in lengths]).to(device)
    with row_lengths(lengths):
        rows = read_rows(mask, SHAPE)
    gradient = inputs[3] * mask[..., None, None]
    results = []
    for use_flex in (True, False):
        given = [x.clone().requires_grad_() for x in inputs[:3]]
        if use_flex:
            context = attend(*given, mask, Plans(mask, lengths, SHAPE).of(0, training))
        else:
            drawn = draw_blocks(rows, 0, device) if training else [None] * len(rows.groups)
            context = BlockSparse.apply(*given, rows, drawn)
        results.append(with_gradients(context, gradient, given))
    return compare(*results)
