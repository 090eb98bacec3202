"""Attention in which packed rows do not see each other, in the kernels that torch has for it.

On a GPU these are flash attention over rows of any length (`varlen_attn`: half precision, no dropout) and else the same and the
memory-efficient kernels behind jagged tensors (any precision, dropout). On a CPU equally long neighbours are one call.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from packed.rows import PackedRows

HALF = (torch.float16, torch.bfloat16)


@torch.compiler.disable
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' AttentionInterface: query, key and value (batch, heads, tokens, size) -> (batch, tokens, heads, size).

    `rows`: where the rows of the one packed sequence lie; or, for a batch whose lengths nobody knew, which tokens of
    (batch, tokens) are real; or None if all are.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(rows, PackedRows):
        seen = None if rows is None else rows[:, None, None, :].expand(-1, 1, query.shape[2], -1)
        context = scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout, scale=scale)
        return context.transpose(1, 2), None
    tokens = tuple(x[0].transpose(0, 1) for x in (query, key, value))
    if query.device.type == "cpu":
        context = _by_length(*tokens, rows, dropout, scale)
    elif dropout == 0 and math.isclose(scale, query.shape[-1] ** -0.5) and _has_flash(tokens[0]):
        context = _flash(*tokens, rows)
    else:
        context = _jagged(*tokens, rows, dropout, scale)
    return context[None], None


def _by_length(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, dropout: float, scale: float) -> Tensor:
    """All tensors (tokens, heads, size)."""
    groups = [(length, len(list(same))) for length, same in itertools.groupby(rows.lengths)]
    sizes = [length * number for length, number in groups]
    found = []
    for (length, number), *parts in zip(groups, *(x.split(sizes) for x in (query, key, value)), strict=True):
        q, k, v = (x.unflatten(0, (number, length)).transpose(1, 2) for x in parts)
        context = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)
        found.append(context.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)


def _flash(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = rows.starts.int(), max(rows.lengths)
    return varlen_attn(query, key, value, starts, starts, longest, longest)


def _jagged(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, dropout: float, scale: float) -> Tensor:
    """Told the shortest and the longest row, jagged tensors need not ask the device."""
    known = {"offsets": rows.starts, "min_seqlen": min(rows.lengths), "max_seqlen": max(rows.lengths)}
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x.contiguous(), **known).transpose(1, 2) for x in (query, key, value)
    )  # fmt: skip
    context = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)
    return context.transpose(1, 2).values()


def _has_flash(query: Tensor) -> bool:
    """Whether `varlen_attn` has a kernel for it: half precision, heads of up to 256, Ampere or later."""
    fits = query.dtype in HALF and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and torch.backends.cuda.is_flash_attention_available() and _capability(query.device) >= (8, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
