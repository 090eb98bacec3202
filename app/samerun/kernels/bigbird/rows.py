"""Groups the rows of a batch by their number of blocks, because a row attends to its own blocks only, and
cuts the work into portions: rows with the same number of blocks, or some heads of one row."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from samerun.kernels.bigbird.blocks import HIDDEN, through_pairs
from samerun.kernels.bigbird.plan import Shape, random_blocks, shortest_sparse
from samerun.kernels.row_lengths import current_row_lengths
from samerun.kernels.transfer import send

PORTION = 2**17  # elements of a tensor per portion, or one head of a row if that is more


@dataclass(eq=False)
class Rows:
    """The rows of a batch by their number of blocks, built once per forward pass of a model.

    It is no tuple and not frozen: torch.compile traces into tuples, and torch 2.11 into frozen dataclasses,
    and would recompile a layer for each batch, or each number of rows.
    """

    mask: Tensor  # (rows, width) bool: real tokens
    shape: Shape
    groups: list[tuple[int, Tensor | None]]  # (number of blocks, numbers of the rows or None for all)


@torch.compiler.disable
def read_rows(attention_mask: Tensor, shape: Shape) -> Rows:
    """Groups the rows. `attention_mask`: (rows, width), not 0 for real tokens; the width is a multiple of the
    block size.

    A row ends with the block of its last real token. Synchronises with the device if the host does not know
    the lengths.
    """
    mask = attention_mask != 0
    if isinstance(mask, FakeTensor):  # a dry run, without values to read
        return Rows(mask, shape, [])
    block_size = shape.block_size
    ends = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)
    blocks, order = ((ends + block_size - 1) // block_size).clamp(min=1).sort(stable=True)
    lengths = current_row_lengths(*mask.shape)
    numbers = (
        blocks.tolist() if lengths is None else sorted(max(1, -(-tokens // block_size)) for tokens in lengths)
    )
    counts = [(number, len(list(same))) for number, same in itertools.groupby(numbers)]
    if len(counts) == 1:
        return Rows(mask, shape, [(counts[0][0], None)])
    parts = order.split([size for _, size in counts])
    return Rows(mask, shape, [(number, part) for (number, _), part in zip(counts, parts, strict=True)])


def draw_blocks(rows: Rows, seed: int, device: torch.device) -> list[Tensor | None]:
    """The random blocks of each group of rows in training, for the layer with this seed; None for groups of
    short rows."""
    shortest = shortest_sparse(rows.shape.num_random_blocks)
    return [
        _drawn(blocks, rows.shape, seed, device) if blocks >= shortest else None for blocks, _ in rows.groups
    ]


@functools.lru_cache(maxsize=4096)
def _drawn(blocks: int, shape: Shape, seed: int, device: torch.device) -> Tensor:
    """Random blocks, (heads, blocks - 2, r)."""
    return send(torch.tensor(random_blocks(blocks, shape, seed)), device)


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
        taken = (
            x[self.rows, : self.length, self.heads]
            .transpose(1, 2)
            .clone(memory_format=torch.contiguous_format)
        )
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
        """(pairs, blocks - 2, keys of an inner block), to add to the scores of its keys, in the order of
        `blocks.Keys`."""
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
    """Yields the portions of a batch with queries `like` (batch, width, heads, size). `drawn`: random blocks
    of each group."""
    heads, size, block_size = *like.shape[2:], rows.shape.block_size
    for (blocks, chosen), plan in zip(rows.groups, drawn, strict=True):
        mask = (rows.mask if chosen is None else rows.mask[chosen])[:, : blocks * block_size].unflatten(
            1, (blocks, -1)
        )
        for row, head in _cuts(len(mask), heads, blocks * block_size * size, like.device):
            part = row if chosen is None else chosen[row]
            if chosen is not None and len(part) == 1 and part.device.type == "cpu":
                part = slice(int(part), int(part) + 1)  # read in place
            own = None if plan is None else plan[head]
            yield Portion(blocks, rows.shape, part, head, mask[row], own)


def portion_size(pairs: int, elements: int, threads: int) -> int:
    """The number of pairs in a portion, at least one portion per thread. `elements`: of a pair."""
    return -(-pairs // max(threads, pairs * elements // PORTION))


def _cuts(rows: int, heads: int, elements: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yields (rows, heads) of each portion: whole rows, or some heads of one row; on a GPU, where kernel
    launches cost more, a single portion."""
    step = (
        portion_size(rows * heads, elements, torch.get_num_threads())
        if device.type == "cpu"
        else rows * heads
    )
    if step >= heads:
        for row in range(0, rows, step // heads):
            yield slice(row, min(row + step // heads, rows)), slice(0, heads)
        return
    step = -(-heads // -(-heads // step))  # equal sizes
    for row in range(rows):
        for head in range(0, heads, step):
            yield slice(row, row + 1), slice(head, min(head + step, heads))
