"""The rows of a batch behind each other, without the padding between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(eq=False)
class PaddingFreeBatch:
    """Where the rows of a padding-free batch lie. It travels through an encoder's layers in the attention mask's place.

    No tuple and not frozen: torch.compile looks into tuples that pass through a layer, and torch 2.11 into frozen data classes
    too, and would compile the layer anew for each batch, or each number of rows.
    """

    lengths: tuple[int, ...]  # tokens of each row, as the host knows them
    starts: Tensor  # (rows + 1,) int64: the first token of each row among all, and their number
    index: Tensor  # (tokens,) int64: each token's place in the padded batch, rows joined
    width: int  # of the padded batch


def padding_free_batch(mask: Tensor, lengths: tuple[int, ...]) -> PaddingFreeBatch:
    """`mask`: (rows, width), not 0 for the real tokens, `lengths[i]` of which begin row i. Does not wait for the device."""
    starts = pad((mask != 0).sum(dim=1).cumsum(dim=0), (1, 0))
    tokens, width = sum(lengths), mask.shape[1]
    # A row's tokens move by as much as the padding of the rows before them.
    padding = torch.arange(len(lengths), device=mask.device) * width - starts[:-1]
    moved = torch.repeat_interleave(padding, starts.diff(), output_size=tokens)
    return PaddingFreeBatch(lengths, starts, torch.arange(tokens, device=mask.device) + moved, width)


def remove_padding(padded: Tensor, rows: PaddingFreeBatch) -> Tensor:
    """(rows, width, size) -> (1, tokens, size)."""
    return padded.flatten(0, 1).index_select(0, rows.index)[None]


def restore_padding(flat: Tensor, rows: PaddingFreeBatch) -> Tensor:
    """(1, tokens, size) -> (rows, width, size), 0 where there is no token."""
    padded = flat.new_zeros(len(rows.lengths) * rows.width, flat.shape[-1])
    return padded.index_copy(0, rows.index, flat[0]).view(len(rows.lengths), rows.width, -1)
