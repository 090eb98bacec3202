"""Block-sparse attention for transformers' BigBird encoders: the same parameters, the same result, less work.

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
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import (
    BigBirdPegasusBlockSparseAttention,
    BigBirdPegasusEncoder,
)

from bigbird.plan import random_blocks, shortest_sparse

HIDDEN = -10000.0  # added to the score of a key that is not to be seen: transformers' value, exp(HIDDEN) is 0
# Scores held at once: on a CPU what stays in a core's cache, elsewhere as many as memory allows, since launches cost more.
SCORES_PER_CORE = 2**20
SCORES_ELSEWHERE = 2**26


def use_fast_attention(model: torch.nn.Module) -> bool:
    """Makes every block-sparse BigBird encoder in `model` use this module; False if there is none.

    Parameters and state dict stay as they are. From then on the encoders keep their kind of attention at any width (one
    that transformers would turn dense on a narrow batch attends densely in that batch alone).
    """
    found = False
    for encoder in model.modules():
        if isinstance(encoder, BigBirdModel | BigBirdPegasusEncoder) and encoder.attention_type == "block_sparse":
            encoder.create_masks_for_block_sparse_attn = _masks
            encoder.set_attention_type = _keep_attention_type
            for layer in encoder.modules():
                layer.__class__ = FAST.get(type(layer), type(layer))
            found = True
    return found


class Rows(NamedTuple):
    """The rows of a batch by their number of blocks, found once per forward pass of a model."""

    mask: Tensor  # (rows, width) bool: which tokens are real
    groups: list[tuple[int, Tensor | None]]  # number of blocks, the rows that have it (None: all rows do)


@torch.compiler.disable
def read_rows(attention_mask: Tensor, block_size: int) -> Rows:
    """`attention_mask`: (rows, width), not 0 for real tokens; the width is a multiple of `block_size`.

    A row ends with the block of its last real token. Copies one number per row to the host.
    """
    mask = attention_mask != 0
    if isinstance(mask, FakeTensor):  # a rehearsal of the memory (finetune.memory): no values to read, so all rows are full
        return Rows(mask, [])
    length = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)
    blocks, order = ((length + block_size - 1) // block_size).clamp(min=1).sort(stable=True)
    counts = [(number, len(list(same))) for number, same in itertools.groupby(blocks.tolist())]
    if len(counts) == 1:
        return Rows(mask, [(counts[0][0], None)])
    parts = order.split([size for _, size in counts])
    return Rows(mask, [(number, part) for (number, _), part in zip(counts, parts, strict=True)])


def _masks(attention_mask: Tensor, block_size: int) -> tuple[Rows, None, None, None]:
    """In place of transformers' four masks: the first one reaches every layer untouched."""
    return read_rows(attention_mask, block_size), None, None, None


def _keep_attention_type(value: str) -> None:
    """In place of the switch to full attention: rows too short for sparsity have it anyway."""


class _Fast:
    """The forward pass of a block-sparse layer; everything else is the class it is mixed into."""

    def forward(self, hidden_states: Tensor, *masks: Any, from_blocked_mask: Rows | None = None, **_: Any) -> tuple:
        """(rows, width, hidden) -> the same, and None in place of the weights. 0 for tokens that are not real.

        Called by transformers as forward(hidden, band_mask, from_mask, to_mask, from_blocked_mask, to_blocked_mask).
        """
        rows = masks[3] if from_blocked_mask is None else from_blocked_mask
        shape = (*hidden_states.shape[:2], self.num_attention_heads, self.attention_head_size)
        query, key, value = (project(hidden_states).view(shape) for project in (self.query, self.key, self.value))
        return _attend(self, query, key, value, rows).view(*shape[:2], -1), None


class FastBigBirdAttention(_Fast, BigBirdBlockSparseAttention):
    """BigBird's layer."""


class FastBigBirdPegasusAttention(_Fast, BigBirdPegasusBlockSparseAttention):
    """BigBirdPegasus' layer."""


FAST = {
    BigBirdBlockSparseAttention: FastBigBirdAttention,
    BigBirdPegasusBlockSparseAttention: FastBigBirdPegasusAttention,
}


@torch.compiler.disable
def _attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    """Query, key and value (rows, width, heads, size) -> context of that shape, as `layer` attends."""
    if isinstance(query, FakeTensor):
        return _Rehearsal.apply(query, key, value, layer.block_size, layer.num_random_blocks)
    drawn = []
    for blocks, _ in rows.groups:
        sparse = blocks >= shortest_sparse(layer.num_random_blocks)
        sizes = (layer.num_attention_heads, layer.num_random_blocks, layer.block_size, layer.max_seqlen)
        drawn.append(_table(blocks, *sizes, layer.seed, query.device) if sparse and layer.training else None)
    return _BlockSparse.apply(query, key, value, rows, drawn, layer.block_size, layer.num_random_blocks)


@functools.lru_cache(maxsize=4096)
def _table(
    blocks: int, heads: int, number: int, block_size: int, positions: int, seed: int, device: torch.device
) -> Tensor:  # fmt: skip
    """The random blocks of a layer, (heads, blocks - 2, r), on `device`."""
    sizes = {"blocks": blocks, "heads": heads, "number": number, "block_size": block_size, "positions": positions}
    return torch.tensor(random_blocks(**sizes, seed=seed), device=device)


class _BlockSparse(torch.autograd.Function):
    """`drawn`: the random blocks of each group of rows; None for rows that are evaluated or short."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: Rows, drawn: list, block_size: int, number: int
    ) -> Tensor:  # fmt: skip
        context = torch.zeros_like(query, memory_format=torch.contiguous_format)
        with torch.autocast(query.device.type, enabled=False):
            for group in _groups(rows, drawn, query.shape[2], block_size, number):
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
            for group in _groups(*ctx.layout):
                q, k, v, out, d_out = (group.take(x) for x in (*saved, gradient))
                scale = q.shape[-1] ** -0.5
                q *= scale
                d_out *= group.real
                # sum_j P_ij dP_ij, which the softmax's gradient needs, is sum_d O_id dO_id.
                delta = (out * d_out).sum(dim=-1, keepdim=True, dtype=torch.float32)
                d_q = torch.empty_like(q)
                d_k, d_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
                _in_portions(_attention_backward, group, q, k, v, d_out, delta, d_q, d_k, d_v)
                for part, whole in zip((d_q.mul_(scale), d_k, d_v), gradients, strict=True):
                    group.put(part, whole)
        return (*gradients, None, None, None, None)


class _Rehearsal(torch.autograd.Function):
    """The memory that `_BlockSparse` takes for rows of full width, for tensors without values: the same copies, no content."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, block_size: int, number: int) -> Tensor:
        context = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, context)
        blocks, heads = query.shape[1] // block_size, len(query) * query.shape[2]
        seen = 5 + number if blocks >= shortest_sparse(number) else blocks
        room = SCORES_PER_CORE * torch.get_num_threads() if query.device.type == "cpu" else SCORES_ELSEWHERE
        ctx.scores = min(max(room, block_size**2 * seen), heads * blocks * block_size**2 * seen)
        copies = [torch.empty_like(query) for _ in range(4)]
        scores = [query.new_empty(ctx.scores, dtype=torch.float32) for _ in range(2)]
        del copies, scores
        return context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = ctx.saved_tensors  # under checkpointing they may be asked for once only
        query = saved[0]
        gradients = [torch.empty_like(x) for x in saved[:3]]
        copies = [torch.empty_like(query) for _ in range(6)]
        sums = [torch.empty_like(query, dtype=torch.float32) for _ in range(2)]
        scores = [query.new_empty(ctx.scores, dtype=torch.float32) for _ in range(3)]
        del copies, sums, scores
        return (*gradients, None, None)


@dataclass(frozen=True)
class _Group:
    """Rows of equally many blocks. One row and one head are a pair: the pairs are worked on independently."""

    blocks: int
    rows: Tensor | None  # (rows of the group,); None: all of the batch
    block_size: int
    number: int  # random blocks of an inner block
    short: bool
    real: Tensor  # (pairs, blocks, block_size, 1) bool
    bias: Tensor  # (pairs, blocks, block_size): what is added to the scores of a key
    table: Tensor | None  # (pairs, blocks - 2, r): random blocks; None in evaluation

    def take(self, x: Tensor) -> Tensor:
        """(batch, width, heads, size) -> a new (pairs, blocks, block_size, size)."""
        x = x[:, : self.blocks * self.block_size]
        x = x if self.rows is None else x.index_select(0, self.rows)
        x = x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        return x.view(-1, self.blocks, self.block_size, x.shape[-1])

    def put(self, part: Tensor, whole: Tensor) -> None:
        """The way back."""
        heads, size = whole.shape[2:]
        length = self.blocks * self.block_size
        part = part.view(-1, heads, length, size).transpose(1, 2)
        if self.rows is None:
            whole[:, :length] = part
        else:
            whole[self.rows, :length] = part.to(whole.dtype)

    def portion(self, pairs: slice) -> _Group:
        """Some of the pairs, which can be neither taken nor put."""
        table = None if self.table is None else self.table[pairs]
        return replace(self, real=self.real[pairs], bias=self.bias[pairs], table=table)

    def inner_bias(self) -> Tensor:
        """(pairs, blocks - 2, keys of an inner block): what is added to the scores of its keys, in `_sparse`'s order."""
        first, last = self.bias[:, None, 0], self.bias[:, None, -1]
        if self.table is None:
            first = first + math.log(1 + self.number)
        window = self.bias.clone()
        window[:, 0] = window[:, -1] = HIDDEN  # seen as first and last block already
        window = window.unfold(1, 3, 1).transpose(2, 3).flatten(2)
        parts = [x.expand(-1, self.blocks - 2, -1) for x in (first, last, window)]
        if self.table is not None:
            parts.append(self.bias.flatten(0, 1)[_through_pairs(self.table, self.blocks)].flatten(2))
        return torch.cat(parts, dim=-1)


def _groups(rows: Rows, drawn: list[Tensor | None], heads: int, block_size: int, number: int) -> Iterator[_Group]:
    for (blocks, chosen), plan in zip(rows.groups, drawn, strict=True):
        mask = rows.mask if chosen is None else rows.mask[chosen]
        mask = mask[:, : blocks * block_size].repeat_interleave(heads, dim=0).view(-1, blocks, block_size)
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, HIDDEN)
        short = blocks < shortest_sparse(number)
        table = None if plan is None else plan.repeat(len(mask) // heads, 1, 1)
        yield _Group(blocks, chosen, block_size, number, short, mask[..., None], bias, table)


def _through_pairs(table: Tensor, blocks: int) -> Tensor:
    """Block numbers (pairs, ...) counted through all pairs."""
    return table + torch.arange(len(table), device=table.device)[:, None, None] * blocks


def _in_portions(work: Callable, group: _Group, *tensors: Tensor) -> None:
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


def _attention(group: _Group, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Fills `out`. All tensors (pairs, blocks, block_size, size)."""
    if group.short:
        _dense(q, k, v, group.bias, out)
        return
    ends = torch.empty_like(q[:, :2])
    _dense(_ends(q), k, v, group.bias, ends)
    out[:, 0], out[:, -1] = ends.unbind(1)
    _sparse(q, k, v, group.table, group.inner_bias(), out)


def _attention_backward(
    group: _Group, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, delta: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor
) -> None:
    """Fills `d_q`, adds to `d_k` and `d_v`. `delta`: see `_BlockSparse.backward`."""
    if group.short:
        _dense_backward(q, k, v, group.bias, d_out, delta, d_q, d_k, d_v)
        return
    ends = torch.empty_like(q[:, :2])
    _dense_backward(_ends(q), k, v, group.bias, _ends(d_out), _ends(delta), ends, d_k, d_v)
    d_q[:, 0], d_q[:, -1] = ends.unbind(1)
    _sparse_backward(q, k, v, group.table, group.inner_bias(), d_out, delta, d_q, d_k, d_v)


def _ends(x: Tensor) -> Tensor:
    """The first and the last block: (pairs, blocks, ...) -> (pairs, 2, ...)."""
    return torch.stack((x[:, 0], x[:, -1]), dim=1)


def _chunks(pairs: int, blocks: int, scores: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cuts `pairs` x `blocks` query blocks, each with so many `scores`, into pieces: whole pairs, or blocks of one pair."""
    room = max(1, (SCORES_PER_CORE if device.type == "cpu" else SCORES_ELSEWHERE) // scores)
    step = min(room, blocks)
    together = max(1, room // blocks)
    for pair in range(0, pairs, together):
        for block in range(0, blocks, step):
            yield slice(pair, min(pair + together, pairs)), slice(block, min(block + step, blocks))


def _weights(scores: Tensor, bias: Tensor) -> Tensor:
    """Scores (..., keys) and what is added to them -> attention weights in fp32. May write into `scores`."""
    # Looking would make a GPU wait for its queue.
    if bias.device.type != "cpu" or bias.any():
        scores = scores.float().add_(bias)
    return torch.softmax(scores, dim=-1, dtype=torch.float32)


# Blocks that attend to everything --------------------------------------------------------------------------------------


def _dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor) -> None:
    """Every block of `q` (pairs, some blocks, block_size, size) attends to every block of `k`; `out` as `q`."""
    for pairs, chosen, keys, values, seen in _dense_chunks(q, k, v, bias):
        chunk = q[pairs, chosen].flatten(1, 2)
        weights = _weights(chunk @ keys.mT, seen).to(v.dtype)
        out[pairs, chosen] = (weights @ values).view_as(out[pairs, chosen])


def _dense_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, d_out: Tensor, delta: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor
) -> None:
    """Fills `d_q`, adds to `d_k` and `d_v`. `delta`: see `_BlockSparse.backward`."""
    for pairs, chosen, keys, values, seen in _dense_chunks(q, k, v, bias):
        chunk, d_chunk, d = (x[pairs, chosen].flatten(1, 2) for x in (q, d_out, delta))
        weights = _weights(chunk @ keys.mT, seen)
        d_scores = (d_chunk @ values.mT).float().sub_(d).mul_(weights).to(q.dtype)
        d_q[pairs, chosen] = (d_scores @ keys).view_as(d_q[pairs, chosen])
        d_k[pairs] += (d_scores.mT @ chunk).view_as(d_k[pairs])
        d_v[pairs] += (weights.to(q.dtype).mT @ d_chunk).view_as(d_v[pairs])


def _dense_chunks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Iterator[tuple]:
    length = k.shape[1] * k.shape[2]
    for pairs, chosen in _chunks(len(q), q.shape[1], q.shape[2] * length, q.device):
        yield pairs, chosen, k[pairs].flatten(1, 2), v[pairs].flatten(1, 2), bias[pairs].flatten(1)[:, None]


# Inner blocks ----------------------------------------------------------------------------------------------------------


def _sparse(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, bias: Tensor, out: Tensor) -> None:
    """Fills the inner blocks of `out` (pairs, blocks, block_size, size)."""
    for piece in _pieces(q, table, bias):
        weights = piece.weights(piece.of(q), piece.keys(k))
        out[piece.pairs, piece.blocks] = piece.sums(weights.to(v.dtype), piece.keys(v))


def _sparse_backward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, bias: Tensor, d_out: Tensor, delta: Tensor,
    d_q: Tensor, d_k: Tensor, d_v: Tensor,
) -> None:  # fmt: skip
    """Fills the inner blocks of `d_q`, adds to `d_k` and `d_v`. `delta`: see `_BlockSparse.backward`."""
    for piece in _pieces(q, table, bias):
        chunk, d_chunk, keys = piece.of(q), piece.of(d_out), piece.keys(k)
        weights = piece.weights(chunk, keys)
        d_scores = piece.products(d_chunk, piece.keys(v)).float().sub_(piece.of(delta)).mul_(weights).to(q.dtype)
        d_q[piece.pairs, piece.blocks] = piece.sums(d_scores, keys)
        piece.spread(d_scores, chunk, d_k)
        piece.spread(weights.to(q.dtype), d_chunk, d_v)


def _pieces(q: Tensor, table: Tensor | None, bias: Tensor) -> Iterator[_Piece]:
    numbers = None if table is None else _through_pairs(table, q.shape[1])
    for pairs, inner in _chunks(len(q), q.shape[1] - 2, q.shape[2] * bias.shape[-1], q.device):
        drawn = None if numbers is None else numbers[pairs, inner].flatten()
        blocks = slice(inner.start + 1, inner.stop + 1)
        yield _Piece(pairs, blocks, q.shape[2], drawn, bias[pairs, inner].flatten(0, 1)[:, None])


class _Keys(NamedTuple):
    """What the query blocks of a piece see, per pair or per query block."""

    ends: Tensor  # (pairs, 2 block_size, size): first and last block
    window: Tensor  # (query blocks, 3 block_size, size): a view where one pair is worked on
    drawn: Tensor | None  # (query blocks, r block_size, size)


@dataclass(frozen=True)
class _Piece:
    """Some inner query blocks of some pairs. Scores are (query blocks, block_size, keys), keys in the order of `_Keys`."""

    pairs: slice
    blocks: slice
    block_size: int
    drawn: Tensor | None  # (query blocks x r,): random blocks, counted through all pairs
    bias: Tensor  # (query blocks, 1, keys)

    def of(self, x: Tensor) -> Tensor:
        """(all pairs, all blocks, block_size, size) -> (query blocks, block_size, size)."""
        return x[self.pairs, self.blocks].flatten(0, 1)

    def keys(self, x: Tensor) -> _Keys:
        own, size = x[self.pairs], x.shape[-1]
        ends = _ends(own).flatten(1, 2)
        seen = own[:, self.blocks.start - 1 : self.blocks.stop + 1].flatten(1, 2)
        window = seen.unfold(1, 3 * self.block_size, self.block_size).mT.flatten(0, 1)
        if self.drawn is None:
            return _Keys(ends, window, None)
        drawn = x.flatten(0, 1).flatten(1).index_select(0, self.drawn)
        return _Keys(ends, window, drawn.view(len(window), -1, size))

    def products(self, chunk: Tensor, keys: _Keys) -> Tensor:
        """Every query times every key that it sees."""
        scores = chunk.new_empty(len(chunk), self.block_size, self.bias.shape[-1])
        torch.bmm(self._by_pair(chunk), keys.ends.mT, out=self._ends_of(scores))
        torch.bmm(chunk, keys.window.mT, out=self._window_of(scores))
        if keys.drawn is not None:
            torch.bmm(chunk, keys.drawn.mT, out=self._drawn_of(scores))
        return scores

    def weights(self, chunk: Tensor, keys: _Keys) -> Tensor:
        return _weights(self.products(chunk, keys), self.bias)

    def sums(self, weights: Tensor, values: _Keys) -> Tensor:
        """The values weighted and summed, (pairs, blocks of a pair, block_size, size)."""
        total = torch.bmm(self._ends_of(weights), values.ends).view(len(weights), self.block_size, -1)
        total.baddbmm_(self._window_of(weights), values.window)
        if values.drawn is not None:
            total.baddbmm_(self._drawn_of(weights), values.drawn)
        return total.view(len(values.ends), -1, *total.shape[1:])

    def spread(self, weights: Tensor, chunk: Tensor, total: Tensor) -> None:
        """Adds to every key block of `total` what the query blocks in `chunk` give it: `sums` the other way round."""
        own = total[self.pairs]
        ends = torch.bmm(self._ends_of(weights).mT, self._by_pair(chunk))
        own[:, 0] += ends[:, : self.block_size]
        own[:, -1] += ends[:, self.block_size :]
        window = torch.bmm(self._window_of(weights).mT, chunk).view(len(own), -1, 3, *total.shape[2:])
        for place in range(3):
            own[:, self.blocks.start + place - 1 : self.blocks.stop + place - 1] += window[:, :, place]
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
