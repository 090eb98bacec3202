"""The rows of a batch by their number of blocks, since a row attends over its own blocks only."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from finetune.kernels.bigbird.plan import Shape, random_blocks, shortest_sparse
from finetune.kernels.row_lengths import current_row_lengths
from finetune.kernels.transfer import send


@dataclass(eq=False)
class Rows:
    """The rows of a batch by their number of blocks, found once per forward pass of a model.

    No tuple and not frozen: torch.compile looks into tuples that pass through a layer, and torch 2.11 into frozen data classes
    too, and would compile the layer anew for each batch, or each number of rows.
    """

    mask: Tensor  # (rows, width) bool: which tokens are real
    shape: Shape
    groups: list[tuple[int, Tensor | None]]  # number of blocks, the rows that have it (None: all rows do)
    plans: Any = None  # `flex.Plans`, where that is used


@torch.compiler.disable
def read_rows(attention_mask: Tensor, shape: Shape) -> Rows:
    """`attention_mask`: (rows, width), not 0 for real tokens; the width is a multiple of the block size.

    A row ends with the block of its last real token. Copies one number per row to the host, if it does not know the lengths.
    """
    mask = attention_mask != 0
    if isinstance(mask, FakeTensor):  # a dry run (finetune.memory_estimate), which has no values to read
        return Rows(mask, shape, [])
    block_size = shape.block_size
    ends = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)
    blocks, order = ((ends + block_size - 1) // block_size).clamp(min=1).sort(stable=True)
    lengths = current_row_lengths(*mask.shape)
    numbers = blocks.tolist() if lengths is None else sorted(max(1, -(-tokens // block_size)) for tokens in lengths)
    counts = [(number, len(list(same))) for number, same in itertools.groupby(numbers)]
    if len(counts) == 1:
        return Rows(mask, shape, [(counts[0][0], None)])
    parts = order.split([size for _, size in counts])
    return Rows(mask, shape, [(number, part) for (number, _), part in zip(counts, parts, strict=True)])


def draw_blocks(rows: Rows, seed: int, device: torch.device) -> list[Tensor | None]:
    """The random blocks of each group of rows in training, for the layer of that seed; None for groups of short rows."""
    shortest = shortest_sparse(rows.shape.number)
    return [_drawn(blocks, rows.shape, seed, device) if blocks >= shortest else None for blocks, _ in rows.groups]


@functools.lru_cache(maxsize=4096)
def _drawn(blocks: int, shape: Shape, seed: int, device: torch.device) -> Tensor:
    """(heads, blocks - 2, r)."""
    return send(torch.tensor(random_blocks(blocks, shape, seed)), device)
