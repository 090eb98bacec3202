"""Batches whose rows are concatenated without padding, and three attention kernels for them. Those for GPUs
are tested before use."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from samerun.kernels.dropout.attention import dropout_attention
from samerun.kernels.self_test import compare, passes, with_gradients

HALF = (torch.float16, torch.bfloat16)
LENGTHS, HEADS, DROPOUT = (65, 1, 17, 17, 130), 2, 0.1  # of the self-test


@dataclass(eq=False)
class PaddingFreeBatch:
    """The positions of the rows in a padding-free batch. It passes through an encoder's layers in place of
    the attention mask.

    It is no tuple and not frozen: torch.compile traces into tuples, and torch 2.11 into frozen dataclasses,
    and would recompile a layer for each batch, or each number of rows.
    """

    lengths: tuple[int, ...]  # tokens of each row, on the host
    starts: Tensor  # (rows + 1,) int64: cumulative lengths from 0 (`cu_seqlens`)
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
    return PaddingFreeBatch(lengths, starts, torch.arange(tokens, device=mask.device) + shifts, width)


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
    tokens = tuple(x[0].transpose(0, 1) for x in (query, key, value))
    kernel = by_length
    if query.device.type != "cpu":
        kind = (query.device, query.dtype, query.shape[-1])
        if has_flash(tokens[0], dropout, scale) and is_usable(flash, *kind, with_dropout=False):
            kernel = flash
        elif is_usable(jagged, *kind, with_dropout=dropout > 0):
            kernel = jagged
    return kernel(*tokens, rows, dropout, scale)[None], None


# The kernels: query, key and value (tokens, heads, size) -> context of that shape.
def by_length(
    query: Tensor, key: Tensor, value: Tensor, rows: PaddingFreeBatch, dropout: float, scale: float
) -> Tensor:
    """The reference, for any device and precision: one call of attention for consecutive rows of equal
    length."""
    groups = [(length, len(list(same))) for length, same in itertools.groupby(rows.lengths)]
    sizes = [length * number for length, number in groups]
    contexts = []
    for (length, number), *parts in zip(groups, *(x.split(sizes) for x in (query, key, value)), strict=True):
        q, k, v = (x.unflatten(0, (number, length)).transpose(1, 2) for x in parts)
        context = dropout_attention(q, k, v, None, dropout, scale)
        contexts.append(context.transpose(1, 2).flatten(0, 1))
    return torch.cat(contexts)


def flash(
    query: Tensor, key: Tensor, value: Tensor, rows: PaddingFreeBatch, dropout: float, scale: float
) -> Tensor:
    """torch's varlen flash attention; see `has_flash`."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = rows.starts.int(), max(rows.lengths)
    return varlen_attn(query, key, value, starts, starts, longest, longest)


def jagged(
    query: Tensor, key: Tensor, value: Tensor, rows: PaddingFreeBatch, dropout: float, scale: float
) -> Tensor:
    """torch's attention over jagged tensors. With the minimum and maximum length they need not synchronise
    with the device."""
    layout = {"offsets": rows.starts, "min_seqlen": min(rows.lengths), "max_seqlen": max(rows.lengths)}
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x.contiguous(), **layout).transpose(1, 2) for x in (query, key, value)
    )  # fmt: skip
    context = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale).transpose(1, 2).values()
    if context.requires_grad:
        # torch 2.13 ignores the storage offset of a gradient that is a view.
        context.register_hook(lambda gradient: gradient.clone() if gradient.storage_offset() else gradient)
    return context


def has_flash(query: Tensor, dropout: float, scale: float) -> bool:
    """Whether `varlen_attn` supports these inputs: half precision, head size up to 256, no dropout, Ampere or
    later."""
    if dropout or not math.isclose(scale, query.shape[-1] ** -0.5):
        return False
    fits = query.dtype in HALF and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and torch.backends.cuda.is_flash_attention_available() and _capability(query.device) >= (8, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def is_usable(
    kernel: Callable, device: torch.device, dtype: torch.dtype, size: int, with_dropout: bool
) -> bool:
    """Self-test: whether a kernel runs on `device` for heads of `size`, and its results and gradients equal
    the reference; with dropout, whether they are finite."""
    failure = f"padding-free attention does not use its {kernel.__name__} kernel ({dtype}, heads of {size})"
    return passes(lambda: _problem(kernel, device, dtype, size, with_dropout), failure)


def _problem(
    kernel: Callable, device: torch.device, dtype: torch.dtype, size: int, with_dropout: bool
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, sum(LENGTHS), HEADS, size, generator=generator).to(device, dtype)
    mask = torch.stack([torch.arange(max(LENGTHS)) < length for length in LENGTHS]).to(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        problem = compare(_results(kernel, inputs, mask, 0.0), _results(by_length, inputs, mask, 0.0))
        if (
            problem is None
            and with_dropout
            and not all(x.isfinite().all() for x in _results(kernel, inputs, mask, DROPOUT))
        ):
            problem = "its results with dropout are not finite"
    return problem


def _results(kernel: Callable, inputs: Tensor, mask: Tensor, dropout: float) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    context = kernel(*leaves, padding_free_batch(mask, LENGTHS), dropout, inputs.shape[-1] ** -0.5)
    return with_gradients(context, inputs[3], leaves)
