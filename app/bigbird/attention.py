"""Block-sparse attention as BigBird's, forward and backward.

A row of n blocks (its own, whatever its batch is padded to) attends as in transformers' `bigbird_block_sparse_attention`:

- its first and its last block attend to everything;
- an inner block attends to the first and the last block, to itself and its two neighbours, and to r random blocks, which
  in training are drawn per layer, head and block, and in evaluation are all block 0 (so that this one counts 1 + r times);
- a row too short for that (n <= 5 + 2r) attends to everything.

Attention weights have no dropout, in transformers' block-sparse attention as here. The backward pass computes the weights
again instead of keeping them (as in FlashAttention, arXiv 2205.14135, algorithm 4): the memory that a layer holds grows
with the length, not with length x keys. Keys of the window are read in place, only random blocks are copied.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from bigbird.dense import dense, dense_backward
from bigbird.plan import shortest_sparse
from bigbird.rows import Group, Rows, groups_of
from bigbird.scores import Backward, ends_of
from bigbird.sparse import sparse, sparse_backward


class BlockSparse(torch.autograd.Function):
    """`drawn`: the random blocks of each group of rows; None for rows that are evaluated or short."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: Rows, drawn: list, block_size: int, number: int
    ) -> Tensor:  # fmt: skip
        context = torch.zeros_like(query, memory_format=torch.contiguous_format)
        with torch.autocast(query.device.type, enabled=False):
            for group in groups_of(rows, drawn, query.shape[2], block_size, number):
                q, k, v = (group.take(x) for x in (query, key, value))
                q *= q.shape[-1] ** -0.5
                out = torch.empty_like(q)
                _in_portions(_attention, group, q, k, v, out)
                group.put(out * group.real, context)
        ctx.save_for_backward(query, key, value, context)
        ctx.layout = (rows, drawn, query.shape[2], block_size, number)
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = ctx.saved_tensors
        gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in saved[:3]]
        with torch.autocast(gradient.device.type, enabled=False):
            for group in groups_of(*ctx.layout):
                q, k, v, out, d_out = (group.take(x) for x in (*saved, gradient))
                scale = q.shape[-1] ** -0.5
                q *= scale
                d_out *= group.real
                # sum_j P_ij dP_ij is sum_d O_id dO_id.
                delta = (out * d_out).sum(dim=-1, keepdim=True, dtype=torch.float32)
                d_q = torch.empty_like(q)
                d_k, d_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
                _in_portions(_attention_backward, group, q, k, v, d_out, delta, d_q, d_k, d_v)
                for part, whole in zip((d_q.mul_(scale), d_k, d_v), gradients, strict=True):
                    group.put(part, whole)
        return (*gradients, None, None, None, None)


def _in_portions(work: Callable, group: Group, *tensors: Tensor) -> None:
    """Calls work(group, *tensors) for portions of the pairs, on a CPU in as many threads as torch has.

    Each of these threads computes alone. Were every operation shared out instead, the cores would wait for each other after
    each of the hundreds of small ones: hardly felt on a quiet machine, ten times slower where other processes compute too.
    """
    pairs, threads = len(tensors[0]), torch.get_num_threads()
    if tensors[0].device.type != "cpu" or threads == 1 or pairs == 1:
        work(group, *tensors)
        return
    # Threads start with modes of their own.
    inference = torch.is_inference_mode_enabled()

    def one(portion: slice) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work(group.portion(portion), *(x[portion] for x in tensors))

    step = -(-pairs // threads)
    if group.blocks >= shortest_sparse(group.number):
        step = 1  # long rows: the threads that get on take more of them
    portions = [slice(start, min(start + step, pairs)) for start in range(0, pairs, step)]
    for _ in _threads(os.getpid(), threads).map(one, portions):
        pass


@functools.lru_cache(maxsize=1)
def _threads(process: int, number: int) -> ThreadPoolExecutor:
    """Threads in each of which torch uses one core. `process`: threads do not survive a fork, so a child needs its own."""
    pool, met = ThreadPoolExecutor(number, thread_name_prefix="bigbird"), threading.Barrier(number)

    def prepare(_: int) -> None:
        torch.set_num_threads(1)
        met.wait()

    list(pool.map(prepare, range(number)))
    torch.set_num_threads(number)  # the number is also the default of threads to come: put it back
    return pool


def _attention(group: Group, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Fills `out`. All tensors (pairs, blocks, block_size, size)."""
    if group.short:
        dense(q, k, v, group.bias, out)
        return
    ends = torch.empty_like(q[:, :2])
    dense(ends_of(q), k, v, group.bias, ends)
    out[:, 0], out[:, -1] = ends.unbind(1)
    sparse(q, k, v, group.table, group.inner_bias(), out)


def _attention_backward(group: Group, *tensors: Tensor) -> None:
    """`tensors`: those of `Backward`."""
    x = Backward(*tensors)
    if group.short:
        dense_backward(x, group.bias)
        return
    d_ends = torch.empty_like(x.q[:, :2])
    ends = x._replace(q=ends_of(x.q), d_out=ends_of(x.d_out), delta=ends_of(x.delta), d_q=d_ends)
    dense_backward(ends, group.bias)
    x.d_q[:, 0], x.d_q[:, -1] = d_ends.unbind(1)
    sparse_backward(x, group.table, group.inner_bias())
