"""BigBird's block-sparse attention, forward and backward.

A row of n blocks, not counting the padding of its batch, attends as in transformers'
`bigbird_block_sparse_attention`:

- The first and the last block attend to everything.
- An inner block attends to the first and the last block, to itself and its two neighbours, and to r random
  blocks. In training they are drawn per layer, head and block; in evaluation all are block 0, which counts 1
  + r times.
- A row of n <= 5 + 2r blocks attends to everything.

As in transformers, attention weights have no dropout. The backward pass recomputes the weights (as in
FlashAttention, arXiv 2205.14135, algorithm 4), so a layer stores memory in proportion to the length. Window
keys are read in place; only random blocks are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from samerun.kernels.bigbird.blocks import Backward, dense, dense_backward, ends_of, sparse, sparse_backward
from samerun.kernels.bigbird.rows import Portion, Rows, portions_of
from samerun.kernels.threads import in_threads


class BlockSparse(torch.autograd.Function):
    """Query, key and value (batch, width, heads, size) -> context, shaped as query. `drawn`: the random
    blocks of each group of rows; None in evaluation and for short rows."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: Rows, drawn: list) -> Tensor:
        context = _empty_result(query, rows)
        with torch.autocast(query.device.type, enabled=False):
            _in_portions(_attention, portions_of(rows, drawn, query), query, key, value, context)
        ctx.save_for_backward(query, key, value, context)
        ctx.rows, ctx.drawn = rows, drawn
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = ctx.saved_tensors
        gradients = [_empty_result(x, ctx.rows) for x in saved[:3]]
        with torch.autocast(gradient.device.type, enabled=False):
            portions = portions_of(ctx.rows, ctx.drawn, gradient)
            _in_portions(_attention_backward, portions, *saved, gradient, *gradients)
        return (*gradients, None, None)


def _empty_result(like: Tensor, rows: Rows) -> Tensor:
    """A contiguous tensor, 0 where no portion writes."""
    whole = rows.groups == [(like.shape[1] // rows.shape.block_size, None)]
    return (torch.empty_like if whole else torch.zeros_like)(like, memory_format=torch.contiguous_format)


def _in_portions(work: Callable, portions: Iterable[Portion], *tensors: Tensor) -> None:
    """Calls work(portion, *tensors) for each portion."""
    if tensors[0].device.type == "cpu":
        in_threads(lambda portion: work(portion, *tensors), portions)
        return
    for portion in portions:
        work(portion, *tensors)


def _attention(portion: Portion, query: Tensor, key: Tensor, value: Tensor, context: Tensor) -> None:
    """Fills the portion of `context`. All tensors are (batch, width, heads, size)."""
    q, k, v = map(portion.take, (query, key, value))
    q *= q.shape[-1] ** -0.5
    out = torch.empty_like(q)
    if portion.short:
        dense(q, k, v, portion.bias, out)
    else:
        ends = torch.empty_like(q[:, :2])
        dense(ends_of(q), k, v, portion.bias, ends)
        out[:, 0], out[:, -1] = ends.unbind(1)
        sparse(q, k, v, portion.table, portion.inner_bias, out)
    out *= portion.real
    portion.put(out, context)


def _attention_backward(
    portion: Portion, query: Tensor, key: Tensor, value: Tensor, context: Tensor, gradient: Tensor,
    *gradients: Tensor
) -> None:  # fmt: skip
    """Fills the portion of the three `gradients`, of query, key and value. All tensors are shaped as in
    `_attention`."""
    q, k, v, out, d_out = map(portion.take, (query, key, value, context, gradient))
    scale = q.shape[-1] ** -0.5
    q *= scale
    d_out *= portion.real
    # sum_j P_ij dP_ij = sum_d O_id dO_id
    delta = out.mul_(d_out).sum(dim=-1, keepdim=True, dtype=torch.float32)
    d_q = torch.empty_like(q)
    d_k, d_v = (torch.zeros_like(k, dtype=torch.float32) for _ in range(2))
    x = Backward(q, k, v, d_out, delta, d_q, d_k, d_v)
    if portion.short:
        dense_backward(x, portion.bias)
    else:
        d_ends = torch.empty_like(q[:, :2])
        ends = x._replace(q=ends_of(q), d_out=ends_of(d_out), delta=ends_of(delta), d_q=d_ends)
        dense_backward(ends, portion.bias)
        d_q[:, 0], d_q[:, -1] = d_ends.unbind(1)
        sparse_backward(x, portion.table, portion.inner_bias)
    for part, whole in zip((d_q.mul_(scale), d_k, d_v), gradients, strict=True):
        portion.put(part, whole)
