"""Attention with dropout on a CPU for every model whose attention is transformers' `sdpa`; torch has no fused kernel for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from finetune.kernels.dropout.bias import bias_of
from finetune.kernels.dropout.dropout import Dropout, draws_here
from finetune.kernels.dropout.portions import NoisyAttention

KNOWN = {"output_attentions", "use_cache"}  # what may be asked for besides, and changes nothing


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """transformers' AttentionInterface: query, key and value (batch, heads, tokens, size) -> (batch, tokens, heads, size)."""
    unusual = key.shape[1] != query.shape[1] or any(x is not None for name, x in named.items() if name not in KNOWN)
    if unusual or not draws_here(query, dropout):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **named
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is None and is_causal and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    context = noisy_attention(query, key, value, attention_mask, dropout, scaling)
    return context.transpose(1, 2).contiguous(), None


def noisy_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, scale: float | None = None
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` of (rows, heads, tokens, size) whose weights are dropped with probability `p`.

    `mask` expands to (rows, heads, queries, keys): bool, true where a query sees a key, or what is added to the scores.
    """
    if not draws_here(query, p) or (mask is not None and mask.requires_grad):
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=p, scale=scale)
    with torch.autocast("cpu", enabled=False):
        bias = None if mask is None else bias_of(mask)
        return NoisyAttention.apply(query, key, value, bias, p, query.shape[-1] ** -0.5 if scale is None else scale)


def use_fast_dropout(model: nn.Module) -> None:
    """Replaces every `nn.Dropout` of `model` by ours, and transformers' `sdpa` attention in this process by `attend`.

    Parameters, state dict and configuration stay as they are.
    """
    for module in model.modules():
        if type(module) is nn.Dropout and not module.inplace:
            module.__class__ = Dropout
    AttentionInterface.register("sdpa", attend)
