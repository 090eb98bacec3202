"""Attention in which the rows of a padding-free batch do not see each other, in the kernels that torch has for it.

On a GPU these are flash attention over rows of any length (`varlen_attn`: half precision, no dropout) and else the same and the
memory-efficient kernels behind jagged tensors (any precision, dropout), each after a check that it works there. On a CPU, and
where both fail, equally long neighbours are one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from finetune.kernels.dropout.attention import dropout_attention
from finetune.kernels.padding_free.batch import PaddingFreeBatch
from finetune.kernels.padding_free.check import works
from finetune.kernels.padding_free.kernels import by_length, flash, has_flash, jagged


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
    """transformers' AttentionInterface: query, key and value (batch, heads, tokens, size) -> (batch, tokens, heads, size).

    `rows`: where the rows of the one sequence lie; or, for a batch whose lengths nobody knew, which tokens of
    (batch, tokens) are real; or None if all are.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(rows, PaddingFreeBatch):
        seen = None if rows is None else rows[:, None, None, :].expand(-1, 1, query.shape[2], -1)
        context = dropout_attention(query, key, value, seen, dropout, scale)
        return context.transpose(1, 2), None
    tokens = tuple(x[0].transpose(0, 1) for x in (query, key, value))
    kernel = by_length
    if query.device.type != "cpu":
        kind = (query.device, query.dtype, query.shape[-1])
        if has_flash(tokens[0], dropout, scale) and works("flash", *kind, with_dropout=False):
            kernel = flash
        elif works("jagged", *kind, with_dropout=dropout > 0):
            kernel = jagged
    return kernel(*tokens, rows, dropout, scale)[None], None
