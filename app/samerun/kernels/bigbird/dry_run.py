"""Block-sparse attention in a dry run on tensors without values (`samerun.memory.dry_run`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from samerun.kernels.bigbird.blocks import SCORES_PER_THREAD
from samerun.kernels.bigbird.plan import Shape, shortest_sparse
from samerun.kernels.bigbird.rows import portion_size


class BlockSparseDryRun(torch.autograd.Function):
    """Allocates what `attention.BlockSparse` allocates on a CPU for rows of full width. Used for GPUs as
    well, where it was not measured."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        context = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, context)
        ctx.sizes = _sizes(query, shape)
        _allocate(query, ctx.sizes, 4, 0)
        return context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = ctx.saved_tensors  # under checkpointing they can be read once only
        gradients = [torch.empty_like(x) for x in saved[:3]]
        _allocate(saved[0], ctx.sizes, 6, 2)
        return (*gradients, None)


class _Sizes(NamedTuple):
    """Elements of the tensors of all threads at a time."""

    portion: int
    scores: int
    copies: int  # of queries, and of keys that are not read in place


def _sizes(query: Tensor, shape: Shape) -> _Sizes:
    number, block_size = shape.num_random_blocks, shape.block_size
    (rows, width, heads, size), threads = query.shape, torch.get_num_threads()
    blocks, pairs = width // block_size, rows * heads
    is_sparse = blocks >= shortest_sparse(number)
    keys = block_size * (5 + number if is_sparse else blocks)  # that a query sees
    at_once = min(pairs, threads * portion_size(pairs, width * size, threads))
    scores = min(max(SCORES_PER_THREAD * threads, block_size * keys), at_once * width * keys)
    queries = scores // keys * size if is_sparse else 0
    in_place = scores <= width * keys * threads  # the window's keys, if a thread works on one pair
    return _Sizes(at_once * width * size, scores, queries * (number if in_place else number + 3 + 1))


def _allocate(query: Tensor, sizes: _Sizes, portions: int, sums: int) -> None:
    """Allocates and frees the peak memory of a pass: scores, weights, copies of `portions` portions, and
    `sums` portions in fp32."""
    casts = 0 if query.dtype == torch.float32 or not sums else sizes.scores
    tensors = [query.new_empty(portions * sizes.portion + sizes.scores + (2 if sums else 1) * sizes.copies)]
    tensors.append(query.new_empty(sums * sizes.portion + sizes.scores + casts, dtype=torch.float32))
    del tensors
