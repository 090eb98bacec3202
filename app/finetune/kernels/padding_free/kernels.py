"""Attention in padding-free batches: query, key and value (tokens, heads, size) -> a tensor of that shape, by three ways."""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from finetune.kernels.dropout.attention import dropout_attention
from finetune.kernels.padding_free.batch import PaddingFreeBatch

HALF = (torch.float16, torch.bfloat16)


def by_length(query: Tensor, key: Tensor, value: Tensor, rows: PaddingFreeBatch, dropout: float, scale: float) -> Tensor:
    """One call of torch's attention for equally long neighbours: on any device, in any precision."""
    groups = [(length, len(list(same))) for length, same in itertools.groupby(rows.lengths)]
    sizes = [length * number for length, number in groups]
    found = []
    for (length, number), *parts in zip(groups, *(x.split(sizes) for x in (query, key, value)), strict=True):
        q, k, v = (x.unflatten(0, (number, length)).transpose(1, 2) for x in parts)
        context = dropout_attention(q, k, v, None, dropout, scale)
        found.append(context.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)


def flash(query: Tensor, key: Tensor, value: Tensor, rows: PaddingFreeBatch, dropout: float, scale: float) -> Tensor:
    """Flash attention over rows of any length; see `has_flash`."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = rows.starts.int(), max(rows.lengths)
    return varlen_attn(query, key, value, starts, starts, longest, longest)


def jagged(query: Tensor, key: Tensor, value: Tensor, rows: PaddingFreeBatch, dropout: float, scale: float) -> Tensor:
    """Told the shortest and the longest row, jagged tensors need not ask the device."""
    known = {"offsets": rows.starts, "min_seqlen": min(rows.lengths), "max_seqlen": max(rows.lengths)}
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x.contiguous(), **known).transpose(1, 2) for x in (query, key, value)
    )  # fmt: skip
    context = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale).transpose(1, 2).values()
    if context.requires_grad:
        # torch 2.13 reads a gradient that is part of a larger tensor from that tensor's beginning.
        context.register_hook(lambda gradient: gradient.clone() if gradient.storage_offset() else gradient)
    return context


def has_flash(query: Tensor, dropout: float, scale: float) -> bool:
    """Whether `varlen_attn` has a kernel for it: half precision, heads of up to 256, no dropout, Ampere or later."""
    if dropout or not math.isclose(scale, query.shape[-1] ** -0.5):
        return False
    fits = query.dtype in HALF and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and torch.backends.cuda.is_flash_attention_available() and _capability(query.device) >= (8, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
