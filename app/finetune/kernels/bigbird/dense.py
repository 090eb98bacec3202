"""Blocks that attend to everything."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from finetune.kernels.bigbird.scores import Backward, chunks, weights_of
from finetune.kernels.scratch import scratch


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor) -> None:
    """Every block of `q` (pairs, some blocks, block_size, size) attends to every block of `k`; `out` as `q`."""
    for pairs, chosen, keys, values, seen in _pieces(q, k, v, bias):
        chunk = q[pairs, chosen].flatten(1, 2)
        weights = weights_of(_products(chunk, keys), seen).to(v.dtype)
        out[pairs, chosen] = (weights @ values).view_as(out[pairs, chosen])


def dense_backward(x: Backward, bias: Tensor) -> None:
    """`x.q` may hold some of the blocks, as `dense`'s."""
    for pairs, chosen, keys, values, seen in _pieces(x.q, x.k, x.v, bias):
        chunk, d_chunk, d = (y[pairs, chosen].flatten(1, 2) for y in (x.q, x.d_out, x.delta))
        weights = weights_of(_products(chunk, keys), seen)
        d_scores = _products(d_chunk, values).float().sub_(d).mul_(weights).to(x.q.dtype)
        x.d_q[pairs, chosen] = (d_scores @ keys).view_as(x.d_q[pairs, chosen])
        x.d_k[pairs] += (d_scores.mT @ chunk).view_as(x.d_k[pairs])
        x.d_v[pairs] += (weights.to(x.q.dtype).mT @ d_chunk).view_as(x.d_v[pairs])


def _products(chunk: Tensor, keys: Tensor) -> Tensor:
    """Every query times every key, until this thread's next products."""
    shape = (*chunk.shape[:2], keys.shape[1])
    return torch.bmm(chunk, keys.mT, out=scratch("scores", shape, chunk.dtype, chunk))


def _pieces(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Iterator[tuple]:
    length = k.shape[1] * k.shape[2]
    for pairs, chosen in chunks(len(q), q.shape[1], q.shape[2] * length, q.device):
        yield pairs, chosen, k[pairs].flatten(1, 2), v[pairs].flatten(1, 2), bias[pairs].flatten(1)[:, None]
