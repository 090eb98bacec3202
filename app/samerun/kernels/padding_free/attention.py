"""Batches whose rows are concatenated without padding, and their attention."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from samerun.kernels.dropout.attention import dropout_attention


@dataclass(eq=False)
class PaddingFreeBatch:
    """The positions of the rows in a padding-free batch. It passes through an encoder's layers in place of
    the attention mask.

    It is no tuple and not frozen: torch.compile traces into tuples, and torch 2.11 into frozen dataclasses,
    and would recompile a layer for each batch, or each number of rows.
    """

    lengths: tuple[int, ...]  # tokens of each row, on the host
    index: Tensor  # (tokens,) int64: each token's position in the flattened padded batch
    width: int  # of the padded batch


def padding_free_batch(mask: Tensor, lengths: tuple[int, ...]) -> PaddingFreeBatch:
    """Builds the positions without synchronising with the device. `mask`: (rows, width), not 0 for the first
    `lengths[i]` tokens of row i."""
    starts = pad((mask != 0).sum(dim=1).cumsum(dim=0), (1, 0))
    tokens, width = sum(lengths), mask.shape[1]
    # A row's tokens are shifted by the padding of the rows before it.
    padding = torch.arange(len(lengths), device=mask.device) * width - starts[:-1]
    shifts = torch.repeat_interleave(padding, starts.diff(), output_size=tokens)
    return PaddingFreeBatch(lengths, torch.arange(tokens, device=mask.device) + shifts, width)


def remove_padding(padded: Tensor, rows: PaddingFreeBatch) -> Tensor:
    """(rows, width, size) -> (1, tokens, size)."""
    return padded.flatten(0, 1).index_select(0, rows.index)[None]


def restore_padding(flat: Tensor, rows: PaddingFreeBatch) -> Tensor:
    """(1, tokens, size) -> (rows, width, size), 0 in the padding."""
    padded = flat.new_zeros(len(rows.lengths) * rows.width, flat.shape[-1])
    return padded.index_copy(0, rows.index, flat[0]).view(len(rows.lengths), rows.width, -1)


@torch.compiler.disable
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PaddingFreeBatch | Tensor | None,
    dropout: float = 0.0,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' AttentionInterface: query, key and value (batch, heads, tokens, size) -> (batch, tokens,
    heads, size).

    `rows`: the rows of a padding-free batch, which is one sequence; for a padded batch of unknown lengths,
    its mask (batch, tokens); None without padding.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(rows, PaddingFreeBatch):
        mask = None if rows is None else rows[:, None, None, :].expand(-1, 1, query.shape[2], -1)
        context = dropout_attention(query, key, value, mask, dropout, scale)
        return context.transpose(1, 2), None
    tokens = (x[0].transpose(0, 1) for x in (query, key, value))
    return _by_length(*tokens, rows, dropout, scale)[None], None


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, rows: PaddingFreeBatch, dropout: float, scale: float
) -> Tensor:
    """Query, key and value (tokens, heads, size) -> context of that shape, by one call of attention for
    consecutive rows of equal length."""
    groups = [(length, len(list(same))) for length, same in itertools.groupby(rows.lengths)]
    sizes = [length * number for length, number in groups]
    contexts = []
    for (length, number), *parts in zip(groups, *(x.split(sizes) for x in (query, key, value)), strict=True):
        q, k, v = (x.unflatten(0, (number, length)).transpose(1, 2) for x in parts)
        context = dropout_attention(q, k, v, None, dropout, scale)
        contexts.append(context.transpose(1, 2).flatten(0, 1))
    return torch.cat(contexts)
