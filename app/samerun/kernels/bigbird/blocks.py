"""Attention of blocks, in pieces that fit the CPU's cache. Dense blocks attend to everything; inner blocks
attend to the first and last block, their window and their random blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

HIDDEN = -10000.0  # added to the scores of masked keys: transformers' value, exp(HIDDEN) is 0
SCORES_PER_THREAD = 2**20  # scores of a piece on a CPU, to fit a thread's cache
SCORES_ELSEWHERE = 2**26  # on a GPU, where kernel launches cost more


class Backward(NamedTuple):
    """Inputs and outputs of a backward pass, (pairs, blocks, block_size, size) each."""

    q: Tensor  # scaled
    k: Tensor
    v: Tensor
    d_out: Tensor
    delta: (
        Tensor  # (pairs, blocks, block_size, 1): sum_j P_ij dP_ij of each query, for the softmax's gradient
    )
    d_q: Tensor  # filled
    d_k: Tensor  # added to
    d_v: Tensor  # added to


def chunks(pairs: int, blocks: int, scores: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cuts `pairs` x `blocks` query blocks into pieces: whole pairs, or blocks of one pair. `scores`: of a
    query block."""
    room = max(1, (SCORES_PER_THREAD if device.type == "cpu" else SCORES_ELSEWHERE) // scores)
    step = min(room, blocks)
    together = max(1, room // blocks)
    for pair in range(0, pairs, together):
        for block in range(0, blocks, step):
            yield slice(pair, min(pair + together, pairs)), slice(block, min(block + step, blocks))


def weights_of(scores: Tensor, bias: Tensor) -> Tensor:
    """Attention weights in fp32 from scores (..., keys) and a bias. May overwrite `scores`."""
    return torch.softmax(scores.float().add_(bias), dim=-1)


def ends_of(x: Tensor) -> Tensor:
    """The first and the last block: (pairs, blocks, ...) -> (pairs, 2, ...)."""
    return torch.stack((x[:, 0], x[:, -1]), dim=1)


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor) -> None:
    """Fills `out`: every block of `q` (pairs, some blocks, block_size, size) attends to every block of
    `k`."""
    for pairs, chosen, keys, values, seen in _dense_pieces(q, k, v, bias):
        chunk = q[pairs, chosen].flatten(1, 2)
        weights = weights_of(torch.bmm(chunk, keys.mT), seen).to(v.dtype)
        out[pairs, chosen] = (weights @ values).view_as(out[pairs, chosen])


def dense_backward(x: Backward, bias: Tensor) -> None:
    """The backward pass of `dense`. `x.q` may hold some of the blocks only."""
    for pairs, chosen, keys, values, seen in _dense_pieces(x.q, x.k, x.v, bias):
        chunk, d_chunk, d = (y[pairs, chosen].flatten(1, 2) for y in (x.q, x.d_out, x.delta))
        weights = weights_of(torch.bmm(chunk, keys.mT), seen)
        d_scores = torch.bmm(d_chunk, values.mT).float().sub_(d).mul_(weights).to(x.q.dtype)
        x.d_q[pairs, chosen] = (d_scores @ keys).view_as(x.d_q[pairs, chosen])
        x.d_k[pairs] += (d_scores.mT @ chunk).view_as(x.d_k[pairs])
        x.d_v[pairs] += (weights.to(x.q.dtype).mT @ d_chunk).view_as(x.d_v[pairs])


def _dense_pieces(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Iterator[tuple]:
    length = k.shape[1] * k.shape[2]
    for pairs, chosen in chunks(len(q), q.shape[1], q.shape[2] * length, q.device):
        yield pairs, chosen, k[pairs].flatten(1, 2), v[pairs].flatten(1, 2), bias[pairs].flatten(1)[:, None]


def sparse(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, bias: Tensor, out: Tensor) -> None:
    """Fills the inner blocks of `out` (pairs, blocks, block_size, size).

    `table` (pairs, blocks - 2, r): random blocks, None in evaluation; `bias` (pairs, blocks - 2, keys):
    `Portion.inner_bias`.
    """
    for piece in _pieces(q, table, bias):
        weights = piece.weights(piece.of(q), piece.keys(k))
        out[piece.pairs, piece.blocks] = piece.sums(weights.to(v.dtype), piece.keys(v))


def sparse_backward(x: Backward, table: Tensor | None, bias: Tensor) -> None:
    """The backward pass of `sparse`, for the inner blocks of `x`. `table`, `bias`: as in `sparse`."""
    for piece in _pieces(x.q, table, bias):
        chunk, d_chunk, keys = piece.of(x.q), piece.of(x.d_out), piece.keys(x.k)
        weights = piece.weights(chunk, keys)
        d_scores = (
            piece.products(d_chunk, piece.keys(x.v))
            .float()
            .sub_(piece.of(x.delta))
            .mul_(weights)
            .to(x.q.dtype)
        )
        x.d_q[piece.pairs, piece.blocks] = piece.sums(d_scores, keys)
        piece.spread(d_scores, chunk, x.d_k)
        piece.spread(weights.to(x.q.dtype), d_chunk, x.d_v)


def _pieces(q: Tensor, table: Tensor | None, bias: Tensor) -> Iterator[_Piece]:
    numbers = None if table is None else through_pairs(table, q.shape[1])
    for pairs, inner in chunks(len(q), q.shape[1] - 2, q.shape[2] * bias.shape[-1], q.device):
        drawn = None if numbers is None else numbers[pairs, inner].flatten()
        blocks = slice(inner.start + 1, inner.stop + 1)
        yield _Piece(pairs, blocks, q.shape[2], drawn, bias[pairs, inner].flatten(0, 1)[:, None])


class Keys(NamedTuple):
    """The keys, or values, that the query blocks of a piece see."""

    ends: Tensor  # (pairs, 2 block_size, size): first and last block
    window: Tensor  # (query blocks, 3 block_size, size): a view if the piece has one pair
    drawn: Tensor | None  # (query blocks, r block_size, size)


@dataclass(frozen=True)
class _Piece:
    """Some inner query blocks of some pairs. Scores are (query blocks, block_size, keys), with keys in the
    order of `Keys`."""

    pairs: slice
    blocks: slice
    block_size: int
    drawn: Tensor | None  # (query blocks x r,): random blocks, numbered across all pairs
    bias: Tensor  # (query blocks, 1, keys)

    def of(self, x: Tensor) -> Tensor:
        """(all pairs, all blocks, block_size, size) -> (query blocks, block_size, size)."""
        return x[self.pairs, self.blocks].flatten(0, 1)

    def keys(self, x: Tensor) -> Keys:
        own, size = x[self.pairs], x.shape[-1]
        ends = ends_of(own).flatten(1, 2)
        seen = own[:, self.blocks.start - 1 : self.blocks.stop + 1].flatten(1, 2)
        window = seen.unfold(1, 3 * self.block_size, self.block_size).mT.flatten(0, 1)
        if self.drawn is None:
            return Keys(ends, window, None)
        drawn = x.flatten(0, 1).flatten(1).index_select(0, self.drawn)
        return Keys(ends, window, drawn.view(len(window), -1, size))

    def products(self, chunk: Tensor, keys: Keys) -> Tensor:
        """Scores without bias: each query times each key that it sees."""
        scores = chunk.new_empty(len(chunk), self.block_size, self.bias.shape[-1])
        torch.bmm(self._by_pair(chunk), keys.ends.mT, out=self._ends_of(scores))
        torch.bmm(chunk, keys.window.mT, out=self._window_of(scores))
        if keys.drawn is not None:
            torch.bmm(chunk, keys.drawn.mT, out=self._drawn_of(scores))
        return scores

    def weights(self, chunk: Tensor, keys: Keys) -> Tensor:
        return weights_of(self.products(chunk, keys), self.bias)

    def sums(self, weights: Tensor, values: Keys) -> Tensor:
        """Weighted sums of the values, (pairs, blocks of a pair, block_size, size)."""
        total = torch.bmm(self._ends_of(weights), values.ends).view(len(weights), self.block_size, -1)
        total.baddbmm_(self._window_of(weights), values.window)
        if values.drawn is not None:
            total.baddbmm_(self._drawn_of(weights), values.drawn)
        return total.view(len(values.ends), -1, *total.shape[1:])

    def spread(self, weights: Tensor, chunk: Tensor, total: Tensor) -> None:
        """The transpose of `sums`: adds the weighted query blocks in `chunk` to the key blocks of `total`."""
        own = total[self.pairs]
        ends = torch.bmm(self._ends_of(weights).mT, self._by_pair(chunk))
        own[:, 0] += ends[:, : self.block_size]
        own[:, -1] += ends[:, self.block_size :]
        window = torch.bmm(self._window_of(weights).mT, chunk).view(len(own), -1, 3, *total.shape[2:])
        for offset in range(3):
            own[:, self.blocks.start + offset - 1 : self.blocks.stop + offset - 1] += window[:, :, offset]
        if self.drawn is not None:
            drawn = torch.bmm(self._drawn_of(weights).mT, chunk).view(len(self.drawn), -1)
            total.view(-1, drawn.shape[1]).index_add_(0, self.drawn, drawn.to(total.dtype))

    def _by_pair(self, chunk: Tensor) -> Tensor:
        """(query blocks, block_size, x) -> (pairs, queries, x)."""
        queries = (self.blocks.stop - self.blocks.start) * self.block_size
        return chunk.view(-1, queries, chunk.shape[-1])

    def _ends_of(self, scores: Tensor) -> Tensor:
        return self._by_pair(scores)[:, :, : 2 * self.block_size]

    def _window_of(self, scores: Tensor) -> Tensor:
        return scores[:, :, 2 * self.block_size : 5 * self.block_size]

    def _drawn_of(self, scores: Tensor) -> Tensor:
        return scores[:, :, 5 * self.block_size :]


def through_pairs(table: Tensor, blocks: int) -> Tensor:
    """Renumbers the blocks of `table` (pairs, ...) across all pairs."""
    return table + torch.arange(len(table), device=table.device)[:, None, None] * blocks
