"""Dropout on CPUs, of hidden states and attention weights. For a seed, the sample differs from torch's.

Replaces: `torch.nn.functional.dropout` in every `nn.Dropout`, and `scaled_dot_product_attention` with
dropout, for which torch has no fused kernel on a CPU. Active: in training on a CPU, in code that is not
compiled; attention if it is transformers' `sdpa`. Gain: a MiniLM's training pass is 1.47 times as fast
(docs/speed.md: median of 30 pairs, 185 to 486 tokens a row, two threads; 1.3 to 1.6 over several runs), and
with attention another 0.98 (rows of 20 tokens), 1.04 (180) and 1.6 times (500).

Masks: on a CPU, torch (2.13) draws dropout element by element in one thread, which takes a quarter of a
BERT's training step. Here numpy's SFC64 draws 64 bits for four elements at a time. Its seed comes from
torch's generator and the number of the piece, so the sample depends on the seed but not on the number of
threads. The dropout rate is rounded to a multiple of 2**-16, and the scale follows the rounded rate, so the
expectation is exactly the input.

Attention works in pieces: some rows, some heads of one row, or some queries of one head. The backward pass
recomputes attention weights (as in FlashAttention, arXiv 2205.14135, algorithm 4) but stores the dropout
mask, a byte per weight, because drawing it is slow. The softmax's division, dropout's scale and the scores'
scale apply to the smaller (tokens, size) tensors. The softmax uses powers of 2: MKL's exp (torch 2.13) is 5
to 20 times slower on results too small for fp32, as of masked scores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import has_torch_function_unary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from samerun.kernels.common import in_threads

LEVELS = 2**16
PIECE = 2**20  # elements per random stream; the sample depends on it


class DropoutMask(NamedTuple):
    """A random mask for one tensor."""

    seed: int
    dropped_levels: int  # of LEVELS: the dropout rate

    @classmethod
    def draw(cls, p: float) -> DropoutMask:
        """A mask of dropout probability `p`, 0 < p < 1. Draws one number from torch's generator."""
        seed = torch.randint(2**63 - 1, ())
        # In a dry run tensors have no values.
        return cls(0 if isinstance(seed, FakeTensor) else int(seed), min(round(p * LEVELS), LEVELS - 1))

    @property
    def scale(self) -> float:
        """The factor on kept elements."""
        return LEVELS / (LEVELS - self.dropped_levels)

    def fill(self, kept: Tensor) -> None:
        """Sets `kept` (uint8, contiguous) to 0 for dropped elements and 1 for kept ones."""
        pieces = kept.view(-1).split(PIECE)
        if not isinstance(kept, FakeTensor):
            in_threads(lambda number: self._fill(number, pieces[number]), range(len(pieces)))

    def _fill(self, number: int, kept: Tensor) -> None:
        levels = (
            np.random.SFC64([self.seed, number]).random_raw(-(-len(kept) // 4)).view(np.int16)[: len(kept)]
        )
        # numpy compares 5 to 20 times faster than torch.
        np.greater_equal(levels, self.dropped_levels - LEVELS // 2, out=kept.numpy().view(np.bool_))


def is_active(x: Tensor, p: float) -> bool:
    """Whether our dropout applies to `x`: on a CPU, except in compiled code and under a torch function mode
    (a dry run for a GPU), which must see torch's function."""
    return (
        x.device.type == "cpu"
        and 0 < p < 1
        and not torch.compiler.is_compiling()
        and not has_torch_function_unary(x)
    )


def dropout(x: Tensor, p: float) -> Tensor:
    """`torch.nn.functional.dropout(x, p)` with another sample."""
    return _DropoutFunction.apply(x, p) if is_active(x, p) else functional.dropout(x, p)


class Dropout(nn.Dropout):
    """`nn.Dropout` with this function."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p) if self.training else input


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        kept, mask = (
            torch.empty_like(x, dtype=torch.uint8, memory_format=torch.contiguous_format),
            DropoutMask.draw(p),
        )
        mask.fill(kept)
        ctx.scale = mask.scale
        ctx.save_for_backward(kept)
        return _apply(x, kept, mask.scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return _apply(gradient, kept, ctx.scale), None


def _apply(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    # Multiplying by uint8 would be much slower.
    return (x.contiguous() * kept.to(x.dtype)).mul_(scale)


IGNORED_OPTIONS = {"output_attentions", "use_cache"}  # they do not affect the result
WEIGHTS_AT_ONCE = 2**21
LOG2E = math.log2(math.e)

Place = tuple[slice, ...]  # rows and heads, or rows, heads and queries


def use_cpu_dropout(model: nn.Module) -> None:
    """Replaces every `nn.Dropout` of `model` by ours, and transformers' `sdpa` attention in this process by
    `attend`. Parameters, state dict and configuration stay unchanged."""
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
    """transformers' AttentionInterface: query, key and value (batch, heads, tokens, size) -> (batch, tokens,
    heads, size)."""
    unknown = key.shape[1] != query.shape[1] or any(
        x is not None for name, x in options.items() if name not in IGNORED_OPTIONS
    )
    if unknown or not is_active(query, dropout):
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **options,
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
    """`scaled_dot_product_attention` of (rows, heads, tokens, size) with dropout probability `p`.

    `mask` expands to (rows, heads, queries, keys): bool, true where a query sees a key, or a float to add to
    the scores.
    """
    if not is_active(query, p) or (mask is not None and mask.requires_grad):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=p, scale=scale
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast("cpu", enabled=False):
        return DropoutAttention.apply(query, key, value, None if mask is None else _compact(mask), p, scale)


def _compact(mask: Tensor) -> Tensor:
    """The mask in four dimensions, reduced to size 1 where it is expanded."""
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask[tuple(slice(None) if stride else slice(1) for stride in mask.stride())]
    # transformers repeats the padding mask for every query. A dry run has no values to compare.
    if mask.dtype == torch.bool and (
        isinstance(mask, FakeTensor) or torch.equal(mask, mask[:, :, :1].expand_as(mask))
    ):
        return mask[:, :, :1]
    return mask


class DropoutAttention(torch.autograd.Function):
    """Query (rows, heads, queries, size), key and value (rows, heads, keys, size) -> context, shaped as
    query.

    `mask`: None, or bool or float as in `dropout_attention`, (rows, heads, queries, keys) or 1 in any
    dimension. Half precision is computed in fp32. A query that sees no key gets 0, as in torch.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, scale: float
    ) -> Tensor:  # fmt: skip
        rows, heads, queries, _ = query.shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        limits, dropout = torch.finfo(dtype), DropoutMask.draw(p)
        # Contiguous after transformers transposes heads and tokens.
        context = query.new_empty(rows, queries, heads, value.shape[-1]).transpose(1, 2)
        highest, total = (query.new_empty(rows, heads, queries, 1, dtype=dtype) for _ in range(2))
        kept = query.new_empty(rows, heads, queries, key.shape[2], dtype=torch.uint8)
        dropout.fill(kept)
        for pairs, chunks in _pieces(kept.shape):
            k, v = _take(key, pairs, dtype), _take(value, pairs, dtype)
            for chunk in chunks:
                place = (*pairs, chunk)
                scores = _scores(_take(query, place, dtype).mul_(scale * LOG2E), k, mask, place)
                top = scores.amax(dim=-1, keepdim=True).clamp_(min=limits.min)
                weights = scores.sub_(top).exp2_()
                sums = weights.sum(dim=-1, keepdim=True).clamp_(min=limits.tiny)
                out = torch.bmm(weights.mul_(_take(kept, place, dtype)), v).mul_(dropout.scale / sums)
                for part, whole in ((top, highest), (sums, total), (out, context)):
                    _put(part, whole, place)
        ctx.save_for_backward(query, key, value, mask, highest, total, kept, context)
        ctx.scale, ctx.dropout_scale = scale, dropout.scale
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        query, key, value, mask, highest, total, kept, context = ctx.saved_tensors
        d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
        dtype, scale = highest.dtype, ctx.scale
        for pairs, chunks in _pieces(kept.shape):
            k, v = _take(key, pairs, dtype), _take(value, pairs, dtype)
            d_k, d_v = torch.empty_like(k), torch.empty_like(v)
            for chunk in chunks:
                place, beta = (
                    (*pairs, chunk),
                    int(chunk.start > 0),
                )  # the first chunk overwrites d_k and d_v, later ones add
                q, top, sums, out, d_out = (
                    _take(x, place, dtype) for x in (query, highest, total, context, gradient)
                )
                weights = _scores(q.mul_(scale * LOG2E), k, mask, place).sub_(top).exp2_()
                factors = _take(kept, place, dtype)
                # The softmax's gradient needs sum_j P_ij dP_ij of each query. It equals sum_d O_id dO_id,
                # also with dropout.
                delta = out.mul_(d_out).sum(dim=-1, keepdim=True)
                d_weights = torch.bmm(d_out.mul_(ctx.dropout_scale), v.mT)
                d_scores = torch.addcmul(delta.neg_(), d_weights, factors, out=d_weights).mul_(weights)
                _put(torch.bmm(d_scores, k).mul_(scale / sums), d_query, place)
                d_k.baddbmm_(d_scores.mT, q.div_(sums * LOG2E), beta=beta)
                d_v.baddbmm_(weights.mul_(factors).mT, d_out.div_(sums), beta=beta)
            _put(d_k, d_key, pairs)
            _put(d_v, d_value, pairs)
        return d_query, d_key, d_value, None, None, None


def _pieces(shape: torch.Size) -> Iterator[tuple[Place, list[slice]]]:
    """Yields each piece's (rows, heads) and its chunks of queries. `shape`: (rows, heads, queries, keys)."""
    rows, heads, queries, keys = shape
    step, chunk = max(1, WEIGHTS_AT_ONCE // (queries * keys)), max(1, WEIGHTS_AT_ONCE // keys)
    chunks = [slice(start, min(start + chunk, queries)) for start in range(0, queries, chunk)]
    row_step, head_step = max(1, step // heads), min(step, heads)
    for row, head in itertools.product(range(0, rows, row_step), range(0, heads, head_step)):
        yield (slice(row, min(row + row_step, rows)), slice(head, min(head + head_step, heads))), chunks


def _take(x: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
    """A contiguous copy of a part of (rows, heads, tokens, size), as (rows x heads, tokens, size)."""
    part = x[place]
    return x.new_empty(part.shape, dtype=dtype).copy_(part).flatten(0, 1)


def _put(part: Tensor, whole: Tensor, place: Place) -> None:
    whole[place].copy_(part.view(whole[place].shape))


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, place: Place) -> Tensor:
    scores = torch.bmm(q, k.mT)
    if mask is not None:
        part = mask[
            tuple(cut if size > 1 else slice(1) for cut, size in zip(place, mask.shape, strict=False))
        ]
        if part.dtype == torch.bool:
            part = torch.zeros_like(part, dtype=torch.float32).masked_fill_(~part, -torch.inf)
        _, heads, _ = place
        scores.unflatten(0, (-1, heads.stop - heads.start)).add_(part, alpha=LOG2E)
    return scores
