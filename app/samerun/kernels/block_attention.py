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

It works in portions, rows with the same number of blocks or some heads of one row, and in pieces of them
that fit a thread's cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samerun.kernels.common import in_threads, on_cpu, slices
from samerun.kernels.products import bmm_into

HIDDEN = -10000.0  # added to the scores of masked keys: transformers' value, exp(HIDDEN) is 0
SCORES_PER_THREAD = 2**20  # scores of a piece on a CPU, to fit a thread's cache
SCORES_ELSEWHERE = 2**26  # on a GPU, where kernel launches cost more
PORTION = 2**17  # elements of a tensor per portion, or one head of a row if that is more


class Shape(NamedTuple):
    """What determines the random blocks of a layer, beside its seed and the lengths of rows."""

    heads: int
    num_random_blocks: int  # per inner block
    block_size: int
    positions: int  # of the position table


def shortest_sparse(random_blocks: int) -> int:
    """The least number of blocks for block-sparse attention, as in transformers."""
    return 5 + 2 * random_blocks + 1


@dataclass(eq=False)
class Rows:
    """The rows of a batch by their number of blocks, built once per forward pass of a model.

    It is no tuple and not frozen: torch.compile traces into tuples, and torch 2.11 into frozen dataclasses,
    and would recompile a layer for each batch, or each number of rows.
    """

    mask: Tensor  # (rows, width) bool: real tokens
    shape: Shape
    groups: list[tuple[int, Tensor | None]]  # (number of blocks, numbers of the rows or None for all)


@dataclass(frozen=True)
class Portion:
    """Some rows and heads of a batch. A pair is one row and one head. Tensors are (pairs, blocks, block_size,
    size)."""

    blocks: int  # of each row
    shape: Shape
    rows: slice | Tensor  # of the batch
    heads: slice
    mask: Tensor  # (rows, blocks, block_size) bool: real tokens
    plan: Tensor | None  # (heads, blocks - 2, r): random blocks; None in evaluation and for short rows

    @property
    def short(self) -> bool:
        return self.blocks < shortest_sparse(self.shape.num_random_blocks)

    @property
    def length(self) -> int:
        return self.blocks * self.shape.block_size

    def take(self, x: Tensor) -> Tensor:
        """Copies this portion of `x` (batch, width, heads, size)."""
        taken = x[self.rows, : self.length, self.heads].transpose(1, 2)
        taken = taken.clone(memory_format=torch.contiguous_format)
        return taken.view(-1, self.blocks, self.shape.block_size, x.shape[-1])

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Writes `part`, shaped as from `take`, to this portion of `whole` (batch, width, heads, size)."""
        part = part.view(len(self.mask), -1, self.length, part.shape[-1]).transpose(1, 2)
        whole[self.rows, : self.length, self.heads] = part.to(whole.dtype)

    @cached_property
    def real(self) -> Tensor:
        """(pairs, blocks, block_size, 1) bool: real tokens."""
        return self.mask.repeat_interleave(self.heads.stop - self.heads.start, dim=0)[..., None]

    @cached_property
    def bias(self) -> Tensor:
        """(pairs, blocks, block_size), to add to the scores of each key."""
        real = self.real.squeeze(-1)
        return torch.zeros(real.shape, device=real.device).masked_fill_(~real, HIDDEN)

    @cached_property
    def table(self) -> Tensor | None:
        """(pairs, blocks - 2, r): random blocks; None in evaluation."""
        return None if self.plan is None else self.plan.repeat(len(self.mask), 1, 1)

    @cached_property
    def inner_bias(self) -> Tensor:
        """(pairs, blocks - 2, keys of an inner block in the order of `Keys`), to add to their scores."""
        first, last = self.bias[:, None, 0], self.bias[:, None, -1]
        if self.table is None:
            first = first + math.log(1 + self.shape.num_random_blocks)
        window = self.bias.clone()
        window[:, 0] = window[:, -1] = HIDDEN  # counted as first and last block already
        window = window.unfold(1, 3, 1).transpose(2, 3).flatten(2)
        parts = [x.expand(-1, self.blocks - 2, -1) for x in (first, last, window)]
        if self.table is not None:
            parts.append(self.bias.flatten(0, 1)[through_pairs(self.table, self.blocks)].flatten(2))
        return torch.cat(parts, dim=-1)


def portions_of(rows: Rows, drawn: list[Tensor | None], like: Tensor) -> Iterator[Portion]:
    """The portions of a batch with queries `like` (batch, width, heads, size). `drawn`: random blocks of each
    group."""
    heads, size, block_size = *like.shape[2:], rows.shape.block_size
    for (blocks, chosen), plan in zip(rows.groups, drawn, strict=True):
        mask = rows.mask if chosen is None else rows.mask[chosen]
        mask = mask[:, : blocks * block_size].unflatten(1, (blocks, -1))
        for row, head in _cuts(len(mask), heads, blocks * block_size * size, like):
            part = row if chosen is None else chosen[row]
            if chosen is not None and len(part) == 1 and part.device.type == "cpu":
                part = slice(int(part), int(part) + 1)  # read in place
            own = None if plan is None else plan[head]
            yield Portion(blocks, rows.shape, part, head, mask[row], own)


def _cuts(rows: int, heads: int, elements: int, like: Tensor) -> Iterator[tuple[slice, slice]]:
    """(rows, heads) of each portion: whole rows, or some heads of one row, at least one portion per thread;
    on a GPU, where kernel launches cost more, a single portion. `elements`: of a row's head."""
    pairs = rows * heads
    portions = max(torch.get_num_threads(), pairs * elements // PORTION) if on_cpu(like) else 1
    step = -(-pairs // portions)
    row_step, head_step = max(1, step // heads), -(-heads // -(-heads // step))  # equal numbers of heads
    return itertools.product(slices(rows, row_step), slices(heads, head_step))


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
    if on_cpu(tensors[0]):
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
    """Fills the portion of the `gradients` of query, key and value. Tensors are shaped as in `_attention`."""
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


class Backward(NamedTuple):
    """Inputs and outputs of a backward pass, (pairs, blocks, block_size, size) each."""

    q: Tensor  # scaled
    k: Tensor
    v: Tensor
    d_out: Tensor
    # (pairs, blocks, block_size, 1): sum_j P_ij dP_ij of each query, for the softmax's gradient.
    delta: Tensor
    d_q: Tensor  # filled
    d_k: Tensor  # added to
    d_v: Tensor  # added to


def chunks(pairs: int, blocks: int, scores: int, like: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cuts query blocks into pieces: whole pairs, or blocks of one pair. `scores`: of a query block."""
    room = max(1, (SCORES_PER_THREAD if on_cpu(like) else SCORES_ELSEWHERE) // scores)
    return itertools.product(slices(pairs, max(1, room // blocks)), slices(blocks, min(room, blocks)))


def weights_of(scores: Tensor, bias: Tensor) -> Tensor:
    """Attention weights in fp32 from scores (..., keys) and a bias. May overwrite `scores`."""
    return torch.softmax(scores.float().add_(bias), dim=-1)


def ends_of(x: Tensor) -> Tensor:
    """The first and the last block: (pairs, blocks, ...) -> (pairs, 2, ...)."""
    return torch.stack((x[:, 0], x[:, -1]), dim=1)


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor) -> None:
    """Fills `out`: all blocks of `q` (pairs, some blocks, block_size, size) attend to all blocks of `k`."""
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
    for pairs, chosen in chunks(len(q), q.shape[1], q.shape[2] * length, q):
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
        d_weights = piece.products(d_chunk, piece.keys(x.v)).float()
        d_scores = d_weights.sub_(piece.of(x.delta)).mul_(weights).to(x.q.dtype)
        x.d_q[piece.pairs, piece.blocks] = piece.sums(d_scores, keys)
        piece.spread(d_scores, chunk, x.d_k)
        piece.spread(weights.to(x.q.dtype), d_chunk, x.d_v)


def _pieces(q: Tensor, table: Tensor | None, bias: Tensor) -> Iterator[_Piece]:
    numbers = None if table is None else through_pairs(table, q.shape[1])
    for pairs, inner in chunks(len(q), q.shape[1] - 2, q.shape[2] * bias.shape[-1], q):
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
        bmm_into(self._ends_of(scores), self._by_pair(chunk), keys.ends.mT)
        bmm_into(self._window_of(scores), chunk, keys.window.mT)
        if keys.drawn is not None:
            bmm_into(self._drawn_of(scores), chunk, keys.drawn.mT)
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
