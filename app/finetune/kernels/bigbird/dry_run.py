"""The memory of block-sparse attention in a dry run, on tensors without values (`finetune.memory_estimate`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from finetune.kernels.bigbird.blocks import SCORES_PER_THREAD
from finetune.kernels.bigbird.plan import Shape, shortest_sparse
from finetune.kernels.bigbird.rows import portion_size


class BlockSparseDryRun(torch.autograd.Function):
    """The copies that `attention.BlockSparse` makes on a CPU for rows of full width, without content. They stand for
    a GPU's as well, which were not measured."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        context = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, context)
        ctx.sizes = _sizes(query, shape)
        _take(query, ctx.sizes, 4, 0)
        return context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = ctx.saved_tensors  # under checkpointing they may be asked for once only
        gradients = [torch.empty_like(x) for x in saved[:3]]
        _take(saved[0], ctx.sizes, 6, 2)
        return (*gradients, None)


class _Sizes(NamedTuple):
    """Elements of what is worked on at once."""

    portion: int
    scores: int
    copies: int  # of queries, and of the keys that they see where these are not read in place


def _sizes(query: Tensor, shape: Shape) -> _Sizes:
    number, block_size = shape.number, shape.block_size
    (rows, width, heads, size), threads = query.shape, torch.get_num_threads()
    blocks, pairs = width // block_size, rows * heads
    is_sparse = blocks >= shortest_sparse(number)
    keys = block_size * (5 + number if is_sparse else blocks)  # of a query
    at_once = min(pairs, threads * portion_size(pairs, width * size, threads))
    scores = min(max(SCORES_PER_THREAD * threads, block_size * keys), at_once * width * keys)
    queries = scores // keys * size if is_sparse else 0
    in_place = scores <= width * keys * threads  # the window, where a thread works on one pair
    return _Sizes(at_once * width * size, scores, queries * (number if in_place else number + 3 + 1))


def _take(query: Tensor, sizes: _Sizes, portions: int, sums: int) -> None:
    """Takes and gives back what a pass holds at its worst moment: so many copies of a portion and sums over one in fp32, scores
    and weights."""
    casts = 0 if query.dtype == torch.float32 or not sums else sizes.scores
    held = [query.new_empty(portions * sizes.portion + sizes.scores + (2 if sums else 1) * sizes.copies)]
    held.append(query.new_empty(sums * sizes.portion + sizes.scores + casts, dtype=torch.float32))
    del held
