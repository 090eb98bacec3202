"""The work on a batch in portions: rows of equally many blocks, or some heads of one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from finetune.kernels.bigbird.plan import Shape, shortest_sparse
from finetune.kernels.bigbird.rows import Rows
from finetune.kernels.bigbird.scores import HIDDEN
from finetune.kernels.scratch import scratch

PORTION = 2**17  # elements of a tensor that a thread works on at once, if one head of a row has no more


@dataclass(frozen=True)
class Portion:
    """One row and one head are a pair: pairs are worked on independently, in tensors (pairs, blocks, block_size, size)."""

    blocks: int
    shape: Shape
    rows: slice | Tensor  # of the batch
    heads: slice
    mask: Tensor  # (rows, blocks, block_size) bool: which tokens are real
    plan: Tensor | None  # (heads, blocks - 2, r): random blocks; None in evaluation and for short rows

    @property
    def short(self) -> bool:
        return self.blocks < shortest_sparse(self.shape.number)

    @property
    def length(self) -> int:
        return self.blocks * self.shape.block_size

    def take(self, x: Tensor, name: str) -> Tensor:
        """A copy of this part of (batch, width, heads, size), `scratch` of that name."""
        part = x[self.rows, : self.length, self.heads].transpose(1, 2)
        taken = scratch(name, part.shape, x.dtype, x).copy_(part)
        return taken.view(-1, self.blocks, self.shape.block_size, x.shape[-1])

    def put(self, part: Tensor, whole: Tensor) -> None:
        """The way back."""
        part = part.view(len(self.mask), -1, self.length, part.shape[-1]).transpose(1, 2)
        whole[self.rows, : self.length, self.heads] = part.to(whole.dtype)

    @cached_property
    def real(self) -> Tensor:
        """(pairs, blocks, block_size, 1) bool."""
        return self.mask.repeat_interleave(self.heads.stop - self.heads.start, dim=0)[..., None]

    @cached_property
    def bias(self) -> Tensor:
        """(pairs, blocks, block_size): what is added to the scores of a key."""
        real = self.real.squeeze(-1)
        return torch.zeros(real.shape, device=real.device).masked_fill_(~real, HIDDEN)

    @cached_property
    def table(self) -> Tensor | None:
        """(pairs, blocks - 2, r): random blocks; None in evaluation."""
        return None if self.plan is None else self.plan.repeat(len(self.mask), 1, 1)

    @cached_property
    def inner_bias(self) -> Tensor:
        """(pairs, blocks - 2, keys of an inner block): added to the scores of its keys, in `sparse.Keys`' order."""
        first, last = self.bias[:, None, 0], self.bias[:, None, -1]
        if self.table is None:
            first = first + math.log(1 + self.shape.number)
        window = self.bias.clone()
        window[:, 0] = window[:, -1] = HIDDEN  # seen as first and last block already
        window = window.unfold(1, 3, 1).transpose(2, 3).flatten(2)
        parts = [x.expand(-1, self.blocks - 2, -1) for x in (first, last, window)]
        if self.table is not None:
            parts.append(self.bias.flatten(0, 1)[through_pairs(self.table, self.blocks)].flatten(2))
        return torch.cat(parts, dim=-1)


def portions_of(rows: Rows, drawn: list[Tensor | None], like: Tensor) -> Iterator[Portion]:
    """All of a batch whose queries are `like` (batch, width, heads, size). `drawn`: the random blocks of each group of rows."""
    heads, size, block_size = *like.shape[2:], rows.shape.block_size
    for (blocks, chosen), plan in zip(rows.groups, drawn, strict=True):
        mask = (rows.mask if chosen is None else rows.mask[chosen])[:, : blocks * block_size].unflatten(1, (blocks, -1))
        for row, head in _cuts(len(mask), heads, blocks * block_size * size, like.device):
            part = row if chosen is None else chosen[row]
            if chosen is not None and len(part) == 1 and part.device.type == "cpu":
                part = slice(int(part), int(part) + 1)  # read in place
            own = None if plan is None else plan[head]
            yield Portion(blocks, rows.shape, part, head, mask[row], own)


def portion_size(pairs: int, elements: int, threads: int) -> int:
    """How many of `pairs`, each of so many elements, a thread works on at once: every thread gets some, then more."""
    return -(-pairs // max(threads, pairs * elements // PORTION))


def _cuts(rows: int, heads: int, elements: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Whole rows, or some heads of one row; on a GPU, where launches cost more, everything at once."""
    step = portion_size(rows * heads, elements, torch.get_num_threads()) if device.type == "cpu" else rows * heads
    if step >= heads:
        for row in range(0, rows, step // heads):
            yield slice(row, min(row + step // heads, rows)), slice(0, heads)
        return
    step = -(-heads // -(-heads // step))  # evenly
    for row in range(rows):
        for head in range(0, heads, step):
            yield slice(row, row + 1), slice(head, min(head + step, heads))


def through_pairs(table: Tensor, blocks: int) -> Tensor:
    """Block numbers (pairs, ...) counted through all pairs."""
    return table + torch.arange(len(table), device=table.device)[:, None, None] * blocks
