"""BigBird's block-sparse attention by torch's FlexAttention, for GPUs: one compiled kernel for forward and
one for backward.

Lists of block numbers (torch's BlockMask) say which key blocks a query block sees. They are built by tensor
operations for all layers of an encoder at once. Scores of a block that counts n times (as block 0 in
evaluation) are increased by log(n). Only a row's last block may contain padding, so only there the kernels
check single tokens.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from samerun.kernels.bigbird.attention import BlockSparse
from samerun.kernels.bigbird.plan import Shape, random_blocks, shortest_sparse
from samerun.kernels.bigbird.rows import draw_blocks, read_rows
from samerun.kernels.row_lengths import row_lengths
from samerun.kernels.self_test import compare, passes, with_gradients
from samerun.kernels.transfer import send

TILE = 64  # queries and keys per kernel tile; blocks are multiples of it
# Of the self-test
SHAPE = Shape(seeds=(0,), heads=2, num_random_blocks=1, block_size=TILE, positions=16 * TILE)
LENGTHS = (13 * TILE - 5, 11 * TILE, 3 * TILE + 1)
TWICE = (16 * TILE - 3, 2 * TILE)  # at 1024 tokens some blocks are drawn twice
CASES = (
    (LENGTHS, True),
    (LENGTHS, False),
    (TWICE, True),
)  # (lengths, training): each compiles another kernel


class Plan(NamedTuple):
    """The block mask of one layer in one forward pass."""

    mask: BlockMask
    bias: Callable | None  # FlexAttention's `score_mod`; None if every block counts once


class Plans:
    """The plans of an encoder's layers for one batch. The first call of `of` builds those of all layers,
    without synchronising with the device. `mask`: (rows, width), not 0 for the first `lengths[i]` tokens of
    row i.
    """

    def __init__(self, mask: Tensor, lengths: tuple[int, ...], shape: Shape) -> None:
        self._tokens, self._width, self._lengths, self._shape = (
            (mask != 0).sum(dim=1),
            mask.shape[1],
            lengths,
            shape,
        )
        self._plans: dict[bool, dict[int, Plan]] = {}  # in training or not -> by the layers' seeds

    def of(self, seed: int, training: bool) -> Plan:
        """The plan of the layer with this seed."""
        if training not in self._plans:
            counts, twice = _counts(
                self._tokens, self._lengths, self._width // self._shape.block_size, self._shape, training
            )
            self._plans[training] = _plans(counts, twice, self._tokens, self._width, self._shape)
        plans = self._plans[training]
        return plans.get(seed, plans[self._shape.seeds[0]])  # in evaluation all layers share one


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, plan: Plan) -> Tensor:
    """Query, key and value (rows, width, heads, size), `mask` (rows, width) bool -> context like query, 0 in
    the padding."""
    function = _compiled() if query.device.type == "cuda" else flex_attention
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        context = function(q, k, v, score_mod=plan.bias, block_mask=plan.mask)
    return context.transpose(1, 2) * mask[..., None, None]


def _counts(
    tokens: Tensor, lengths: tuple[int, ...], blocks: int, shape: Shape, training: bool
) -> tuple[Tensor, bool]:
    """Returns (how often each query block sees each key block, (layers, rows, heads, blocks, blocks); whether
    any count exceeds 1). In evaluation the counts are (1, rows, 1, blocks, blocks), the same for all layers
    and heads.
    """
    number, device = shape.num_random_blocks, tokens.device
    own = [max(1, -(-length // shape.block_size)) for length in lengths]
    ends_at = ((tokens + shape.block_size - 1) // shape.block_size).clamp(min=1)[:, None, None]
    query, key = torch.arange(blocks, device=device)[:, None], torch.arange(blocks, device=device)
    inside = (query < ends_at) & (key < ends_at)
    dense = (query == 0) | (query == ends_at - 1) | (ends_at < shortest_sparse(number))
    seen = inside & (dense | (key == 0) | (key == ends_at - 1) | ((query - key).abs() <= 1))
    counts, long = seen.int()[None, :, None], [n for n in own if n >= shortest_sparse(number)]
    if not training:
        return counts + number * (inside & ~dense & (key == 0))[None, :, None], bool(long)
    drawn = torch.stack([_drawn(n, shape, device)[:, :, :blocks] for n in own], dim=1).clamp(max=blocks)
    drawn_counts = torch.zeros(*drawn.shape[:-1], blocks + 1, dtype=torch.int32, device=device)
    drawn_counts.scatter_add_(-1, drawn, torch.ones_like(drawn, dtype=torch.int32))
    return counts + drawn_counts[..., :blocks], any(_sees_twice(n, shape) for n in long)


@functools.lru_cache(maxsize=256)
def _drawn(blocks: int, shape: Shape, device: torch.device) -> Tensor:
    """The random blocks of a row of this many blocks, (layers, heads, all blocks, r), padded with a number
    above all blocks."""
    most = max(blocks, shape.positions // shape.block_size)
    table = np.full((len(shape.seeds), shape.heads, most, shape.num_random_blocks), most, dtype=np.int64)
    if blocks >= shortest_sparse(shape.num_random_blocks):
        table[:, :, 1 : blocks - 1] = _random_blocks(blocks, shape)
    return send(torch.from_numpy(table), device)


@functools.lru_cache(maxsize=256)
def _sees_twice(blocks: int, shape: Shape) -> bool:
    """Whether any query block of a row of this many blocks draws a block that it sees anyway, or draws one
    twice."""
    drawn = np.sort(_random_blocks(blocks, shape), axis=-1)
    query = np.arange(1, blocks - 1)[:, None]
    anyway = (drawn == 0) | (drawn == blocks - 1) | (abs(drawn - query) <= 1)
    return bool(anyway.any() or (drawn[..., 1:] == drawn[..., :-1]).any())


def _random_blocks(blocks: int, shape: Shape) -> np.ndarray:
    return np.stack([random_blocks(blocks, shape, seed) for seed in shape.seeds])


def _plans(counts: Tensor, twice: bool, tokens: Tensor, width: int, shape: Shape) -> dict[int, Plan]:
    size, by_head = shape.block_size, int(counts.shape[2] > 1)
    seen, bias = counts > 0, counts.clamp(min=1).float().log() if twice else None
    last = (torch.arange(counts.shape[-1], device=tokens.device) == (tokens[:, None] - 1) // size)[
        :, None, None
    ]
    partly, wholly = seen & last, seen & ~last
    lists = [part for blocks in (partly, wholly, partly.mT, wholly.mT) for part in _listed(blocks)]
    plans = {}
    for layer, seed in enumerate(shape.seeds[: len(counts)]):
        mask_mod = _mask_mod(tokens, seen[layer], size, by_head)
        mask = BlockMask(
            (width, width), *(part[layer] for part in lists), BLOCK_SIZE=(size, size), mask_mod=mask_mod
        )
        plans[seed] = Plan(mask, None if bias is None else _score_mod(bias[layer], size, by_head))
    return plans


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Converts a mask (..., n) to (counts, (...,); block numbers with the seen ones first, (..., n)), int32
    as in BlockMask."""
    return blocks.sum(dim=-1, dtype=torch.int32), blocks.byte().argsort(
        dim=-1, descending=True, stable=True
    ).int()


# Closures, because FlexAttention compiles functions of exactly these arguments.
def _mask_mod(tokens: Tensor, seen: Tensor, size: int, by_head: int) -> Callable:
    # Compiled kernels call this for partly seen blocks only, torch's reference on a CPU for all.
    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < tokens[row]) & seen[row, head * by_head, query // size, key // size]

    return is_seen


def _score_mod(bias: Tensor, size: int, by_head: int) -> Callable:
    def add_bias(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias[row, head * by_head, query // size, key // size]

    return add_bias


@functools.cache
def _compiled() -> Callable:
    """`flex_attention`, compiled for any number of rows and blocks."""
    # This import loads torch's compiler, in seconds; only GPUs need it.
    from samerun.kernels.bigbird.flex_tiles import limit_tiles

    limit_tiles(TILE)
    # Variants with and without gradients, biases and several rows exceed torch's default limit of 8.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def is_usable(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Self-test: whether FlexAttention compiles on `device` for heads of `size`, and its results and
    gradients equal `BlockSparse`'s. Later batches reuse the compiled code."""
    return passes(
        lambda: _problem(device, dtype, size),
        f"FlexAttention is not used for BigBird ({dtype}, heads of {size})",
    )


def _problem(device: torch.device, dtype: torch.dtype, size: int) -> str | None:
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError("triton is not installed")
    # The test runs inside the first forward pass: isolate it from inference mode and the hooks of activation
    # checkpointing.
    no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with torch.inference_mode(False), torch.enable_grad(), no_hooks:
        problems = (_difference(device, dtype, size, lengths, training) for lengths, training in CASES)
        return next(filter(None, problems), None)


def _difference(
    device: torch.device, dtype: torch.dtype, size: int, lengths: tuple[int, ...], training: bool
) -> str | None:
    width = -(-max(lengths) // TILE) * TILE
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, len(lengths), width, SHAPE.heads, size, generator=generator).to(device, dtype)
    mask = torch.stack([torch.arange(width) < length for length in lengths]).to(device)
    with row_lengths(lengths):
        rows = read_rows(mask, SHAPE)
    gradient = inputs[3] * mask[..., None, None]
    results = []
    for use_flex in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        if use_flex:
            context = attend(*leaves, mask, Plans(mask, lengths, SHAPE).of(0, training))
        else:
            drawn = draw_blocks(rows, 0, device) if training else [None] * len(rows.groups)
            context = BlockSparse.apply(*leaves, rows, drawn)
        results.append(with_gradients(context, gradient, leaves))
    return compare(*results)
