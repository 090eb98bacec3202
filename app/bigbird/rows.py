"""The rows of a batch by their number of blocks, since a row attends over its own blocks only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from bigbird.plan import shortest_sparse
from bigbird.scores import HIDDEN
from finetune.lengths import known_lengths


class Rows(NamedTuple):
    """The rows of a batch by their number of blocks, found once per forward pass of a model."""

    mask: Tensor  # (rows, width) bool: which tokens are real
    groups: list[tuple[int, Tensor | None]]  # number of blocks, the rows that have it (None: all rows do)
    plan: Callable | None = None  # `flex.plans_of`, where that is used


@torch.compiler.disable
def read_rows(attention_mask: Tensor, block_size: int) -> Rows:
    """`attention_mask`: (rows, width), not 0 for real tokens; the width is a multiple of `block_size`.

    A row ends with the block of its last real token. Copies one number per row to the host, if it does not know the lengths.
    """
    mask = attention_mask != 0
    if isinstance(mask, FakeTensor):  # a rehearsal of the memory (finetune.memory): no values to read, so all rows are full
        return Rows(mask, [])
    length = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)
    blocks, order = ((length + block_size - 1) // block_size).clamp(min=1).sort(stable=True)
    known = known_lengths(*mask.shape)
    numbers = blocks.tolist() if known is None else sorted(max(1, -(-tokens // block_size)) for tokens in known)
    counts = [(number, len(list(same))) for number, same in itertools.groupby(numbers)]
    if len(counts) == 1:
        return Rows(mask, [(counts[0][0], None)])
    parts = order.split([size for _, size in counts])
    return Rows(mask, [(number, part) for (number, _), part in zip(counts, parts, strict=True)])


@dataclass(frozen=True)
class Group:
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

    def portion(self, pairs: slice) -> Group:
        """Some of the pairs, which can be neither taken nor put."""
        table = None if self.table is None else self.table[pairs]
        return replace(self, real=self.real[pairs], bias=self.bias[pairs], table=table)

    def inner_bias(self) -> Tensor:
        """(pairs, blocks - 2, keys of an inner block): added to the scores of its keys, in `sparse.Keys`' order."""
        first, last = self.bias[:, None, 0], self.bias[:, None, -1]
        if self.table is None:
            first = first + math.log(1 + self.number)
        window = self.bias.clone()
        window[:, 0] = window[:, -1] = HIDDEN  # seen as first and last block already
        window = window.unfold(1, 3, 1).transpose(2, 3).flatten(2)
        parts = [x.expand(-1, self.blocks - 2, -1) for x in (first, last, window)]
        if self.table is not None:
            parts.append(self.bias.flatten(0, 1)[through_pairs(self.table, self.blocks)].flatten(2))
        return torch.cat(parts, dim=-1)


def groups_of(rows: Rows, drawn: list[Tensor | None], heads: int, block_size: int, number: int) -> Iterator[Group]:
    for (blocks, chosen), plan in zip(rows.groups, drawn, strict=True):
        mask = rows.mask if chosen is None else rows.mask[chosen]
        mask = mask[:, : blocks * block_size].repeat_interleave(heads, dim=0).view(-1, blocks, block_size)
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, HIDDEN)
        short = blocks < shortest_sparse(number)
        table = None if plan is None else plan.repeat(len(mask) // heads, 1, 1)
        yield Group(blocks, chosen, block_size, number, short, mask[..., None], bias, table)


def through_pairs(table: Tensor, blocks: int) -> Tensor:
    """Block numbers (pairs, ...) counted through all pairs."""
    return table + torch.arange(len(table), device=table.device)[:, None, None] * blocks
