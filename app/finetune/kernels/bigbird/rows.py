"""The rows of a batch by their number of blocks, since a row attends over its own blocks only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from finetune.kernels.row_lengths import known_lengths


@dataclass(eq=False)
class Rows:
    """The rows of a batch by their number of blocks, found once per forward pass of a model.

    No tuple and not frozen: torch.compile looks into tuples that pass through a layer, and torch 2.11 into frozen data classes
    too, and would compile the layer anew for each batch, or each number of rows.
    """

    mask: Tensor  # (rows, width) bool: which tokens are real
    groups: list[tuple[int, Tensor | None]]  # number of blocks, the rows that have it (None: all rows do)
    plan: Callable | None = None  # `flex.plans_of`, where that is used


@torch.compiler.disable
def read_rows(attention_mask: Tensor, block_size: int) -> Rows:
    """`attention_mask`: (rows, width), not 0 for real tokens; the width is a multiple of `block_size`.

    A row ends with the block of its last real token. Copies one number per row to the host, if it does not know the lengths.
    """
    mask = attention_mask != 0
    if isinstance(mask, FakeTensor):  # a dry run (finetune.memory_estimate): no values to read, so all rows are full
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
