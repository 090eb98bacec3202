"""Attention with dropout on a CPU, where torch has no fused kernel for it, in portions: some rows, some heads of one, or some
queries of one head.

The backward pass computes attention weights again instead of keeping them (as in FlashAttention, arXiv 2205.14135, algorithm
4), and they are worked on in memory that is kept; of the noise, which takes long to draw, a byte per weight is kept. Softmax's
division, dropout's scale and that of the scores are done on tensors (tokens, size), which are smaller. Powers are of 2, because
MKL's exp (torch 2.13) is 5 to 20 times slower where a result is too small for fp32, and a mask is there to make it so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.kernels.dropout.bias import Bias
from finetune.kernels.dropout.dropout import factors_of
from finetune.kernels.dropout.stream import Noise
from finetune.kernels.scratch import scratch

WEIGHTS = 2**21  # attention weights that are worked on at once
LOG2E = math.log2(math.e)


class NoisyAttention(torch.autograd.Function):
    """Query (rows, heads, queries, size), key, value (rows, heads, keys, size) -> as query. Half precision is computed in
    single. A query that sees no key gets 0, as from torch's own."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Bias | None, p: float, scale: float
    ) -> Tensor:  # fmt: skip
        rows, heads, queries, _ = query.shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        shape, noise = (rows, heads, queries, key.shape[2]), Noise.of(p)
        # As transformers wants it after the heads.
        context = query.new_empty(rows, queries, heads, value.shape[-1]).transpose(1, 2)
        highest, total = (query.new_empty(rows, heads, queries, 1, dtype=dtype) for _ in range(2))
        kept = query.new_empty(shape, dtype=torch.uint8)
        noise.fill(kept)
        ctx.work = _Work(shape, dtype, bias, scale, noise.scale)
        ctx.work.forward(query, key, value, highest, total, kept, context)
        ctx.save_for_backward(query, key, value, highest, total, kept, context)
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in saved[:3]]
        ctx.work.backward(*saved, gradient, *gradients)
        return (*gradients, None, None, None)


@dataclass(frozen=True)
class _Work:
    shape: tuple[int, int, int, int]  # rows, heads, queries, keys
    dtype: torch.dtype  # that is computed in
    bias: Bias | None
    scale: float  # of scores
    noise_scale: float

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, highest: Tensor, total: Tensor, kept: Tensor, context: Tensor
    ) -> None:  # fmt: skip
        """Fills each query's highest score (as power of 2), its sum of 2**(score - highest), and its result."""
        limits = torch.finfo(self.dtype)
        for portion in self._portions():
            k, v = portion.take("k", key), portion.take("v", value)
            for queries in portion.chunks:
                scores = portion.scores(portion.take("q", query, queries).mul_(self.scale * LOG2E), k, queries)
                top = scores.amax(dim=-1, keepdim=True).clamp_(min=limits.min)
                weights = scores.sub_(top).exp2_()
                sums = weights.sum(dim=-1, keepdim=True).clamp_(min=limits.tiny)
                out = portion.sums("out", weights.mul_(portion.factors(kept, queries)), v)
                for part, whole in ((top, highest), (sums, total), (out.mul_(self.noise_scale / sums), context)):
                    portion.put(part, whole, queries)

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        highest: Tensor,
        total: Tensor,
        kept: Tensor,
        context: Tensor,
        gradient: Tensor,
        *gradients: Tensor,
    ) -> None:
        """Fills the three `gradients`, of query, key and value."""
        named = {"q": query, "top": highest, "sums": total, "out": context, "d_out": gradient}
        for portion in self._portions():
            k, v = portion.take("k", key), portion.take("v", value)
            d_k, d_v = (scratch(f"d_{name}", x.shape, x.dtype, x) for name, x in (("k", k), ("v", v)))
            for queries in portion.chunks:
                goes_on = int(queries.start > 0)
                q, top, sums, out, d_out = (portion.take(name, x, queries) for name, x in named.items())
                weights = portion.scores(q.mul_(self.scale * LOG2E), k, queries).sub_(top).exp2_()
                factors = portion.factors(kept, queries)
                # What the softmax's gradient needs of each query, sum_j P_ij dP_ij, is sum_d O_id dO_id, dropout or not.
                delta = out.mul_(d_out).sum(dim=-1, keepdim=True)
                d_weights = portion.products("d_weights", d_out.mul_(self.noise_scale), v)
                d_scores = torch.addcmul(delta.neg_(), d_weights, factors, out=d_weights).mul_(weights)
                portion.put(portion.sums("d_q", d_scores, k).mul_(self.scale / sums), gradients[0], queries)
                d_k.baddbmm_(d_scores.mT, q.div_(sums * LOG2E), beta=goes_on)
                d_v.baddbmm_(weights.mul_(factors).mT, d_out.div_(sums), beta=goes_on)
            portion.put(d_k, gradients[1])
            portion.put(d_v, gradients[2])

    def _portions(self) -> Iterator[_Portion]:
        rows, heads, queries, keys = self.shape
        step, chunk = max(1, WEIGHTS // (queries * keys)), max(1, WEIGHTS // keys)
        chunks = [slice(start, min(start + chunk, queries)) for start in range(0, queries, chunk)]
        row_step, head_step = max(1, step // heads), min(step, heads)
        for row, head in itertools.product(range(0, rows, row_step), range(0, heads, head_step)):
            pairs = slice(row, min(row + row_step, rows)), slice(head, min(head + head_step, heads))
            yield _Portion(self, pairs, chunks)


@dataclass(frozen=True)
class _Portion:
    """A row and a head are a pair: pairs are worked on in tensors (pairs, tokens, size)."""

    work: _Work
    pairs: tuple[slice, slice]  # rows and heads
    chunks: list[slice]  # queries

    def take(self, name: str, x: Tensor, tokens: slice = slice(None)) -> Tensor:
        """A copy of this part, `scratch` of that name."""
        part = x[self.pairs][:, :, tokens]
        return scratch(name, part.shape, self.work.dtype, x).copy_(part).flatten(0, 1)

    def put(self, part: Tensor, whole: Tensor, tokens: slice = slice(None)) -> None:
        place = whole[self.pairs][:, :, tokens]
        place.copy_(part.view(place.shape))

    def factors(self, kept: Tensor, queries: slice) -> Tensor:
        return factors_of(kept[self.pairs][:, :, queries], self.work.dtype).flatten(0, 1)

    def products(self, name: str, q: Tensor, k: Tensor) -> Tensor:
        """Every query times every key."""
        return torch.bmm(q, k.mT, out=scratch(name, (len(q), q.shape[1], k.shape[1]), q.dtype, q))

    def sums(self, name: str, weights: Tensor, values: Tensor) -> Tensor:
        """The values weighted and summed."""
        return torch.bmm(weights, values, out=scratch(name, (*weights.shape[:2], values.shape[2]), values.dtype, values))

    def scores(self, q: Tensor, k: Tensor, queries: slice) -> Tensor:
        scores = self.products("scores", q, k)
        bias = None if self.work.bias is None else self.work.bias.of(*self.pairs, queries)
        if bias is not None:
            rows, heads = self.pairs
            scores.view(rows.stop - rows.start, heads.stop - heads.start, *scores.shape[1:]).add_(bias, alpha=LOG2E)
        return scores
