"""The switch: every `nn.Dropout` of a model, and every model whose attention is transformers' `sdpa`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from finetune.kernels.dropout.function import DropoutAttention
from finetune.kernels.dropout.module import Dropout, is_active

IGNORED_OPTIONS = {"output_attentions", "use_cache"}  # they change nothing here


def use_cpu_dropout(model: nn.Module) -> None:
    """Replaces every `nn.Dropout` of `model` by ours, and transformers' `sdpa` attention in this process by `attend`.

    Parameters, state dict and configuration stay as they are.
    """
    for module in model.modules():
        if type(module) is nn.Dropout and not module.inplace:
            module.__class__ = Dropout
    AttentionInterface.register("sdpa", attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' AttentionInterface: query, key and value (batch, heads, tokens, size) -> (batch, tokens, heads, size)."""
    unknown = key.shape[1] != query.shape[1] or any(x is not None for name, x in options.items() if name not in IGNORED_OPTIONS)
    if unknown or not is_active(query, dropout):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is None and is_causal and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    context = dropout_attention(query, key, value, attention_mask, dropout, scaling)
    return context.transpose(1, 2).contiguous(), None


def dropout_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, scale: float | None = None
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` of (rows, heads, tokens, size) whose weights are dropped with probability `p`.

    `mask` expands to (rows, heads, queries, keys): bool, true where a query sees a key, or what is added to the scores.
    """
    if not is_active(query, p) or (mask is not None and mask.requires_grad):
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=p, scale=scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast("cpu", enabled=False):
        return DropoutAttention.apply(query, key, value, None if mask is None else _compact(mask), p, scale)


def _compact(mask: Tensor) -> Tensor:
    """The same mask in four dimensions, of size 1 where it repeats itself."""
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask[tuple(slice(None) if stride else slice(1) for stride in mask.stride())]
    # transformers repeats which keys are real for every query. A dry run (finetune.memory_estimate) has no values to compare.
    if mask.dtype == torch.bool and (isinstance(mask, FakeTensor) or torch.equal(mask, mask[:, :, :1].expand_as(mask))):
        return mask[:, :, :1]
    return mask
