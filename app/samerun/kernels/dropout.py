"""Dropout by row: a mask is a function of (seed, step, the row's place in the global batch, the number of the
dropout call in the forward pass, position within the row).

Replaces: in training steps, `torch.nn.functional.dropout`, which every `nn.Dropout` calls, its relatives for
whole channels, `scaled_dot_product_attention` with dropout, stochastic depth, and DeBERTa's dropout of its
relative positions. Active: with --dropout_by row, the default on CPUs. Gain: masks do not depend on the
number of processes, micro-batches, padding, gradient checkpointing or the device. On a CPU it is also faster
than torch (2.13), which draws dropout element by element in one thread (benchmarks/notes.md).

Numbers: the engine seeds torch's generator by (seed, step) before the forward pass of each micro-batch, and
each call draws one number from it. It tells which call it is, and gradient checkpointing restores it.
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014; its mixing function is Stafford's variant 13) hashes this
number and the row's place to the row's key, and the key and a position to 64 bits for four neighbours along
the last dimension. Integers only, so numpy and torch compute the same bits on any device. The dropout rate is
rounded to a multiple of 2**-16, and the scale follows the rounded rate, so the expectation is exactly the
input.

Layouts: the first dimension has the rows of the micro-batch, or so many heads, images or windows of each row.
A parameter, or a tensor of one row in a micro-batch of several, is shared by all rows and micro-batches, and
so is its mask. Any other tensor has a mask of its own in each micro-batch; `samerun parity` names it.

Attention on a CPU works in pieces: some rows, some heads of one row, or some queries of one head. The
backward pass recomputes attention weights (as in FlashAttention, arXiv 2205.14135, algorithm 4) but stores
the dropout mask, a byte per weight, because drawing it is slow. The softmax's division and dropout's scale
apply to the smaller (tokens, size) tensors. The softmax uses powers of 2: MKL's exp (torch 2.13) is 5 to 20
times slower on results too small for fp32, as of masked scores. In bf16 the products are in bf16 if the CPU
has instructions for them, all else is in fp32: a pass of MiniLM over 512 tokens is 1.16 times as fast on an
AMD Zen 4 (benchmarks/notes.md). On a GPU, attention with dropout stores all weights, as transformers' eager
attention does.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import has_torch_function_unary

from samerun.kernels.common import current_rows, in_threads, row_lengths, send

LEVELS = 2**16
LANES = 4  # elements of a word, which has 64 random bits
WORDS_AT_ONCE, WORDS_ON_GPU = 2**15, 2**22  # on a CPU they fit a core's cache
INCREMENT = 0x9E3779B97F4A7C15  # of SplitMix64's counter
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # (shift, factor) of its mixing
SHARED, OTHER = 2**63, 2**63 + 1  # instead of a row's place: for shared tensors; from here on for others

torch_dropout, torch_attention = functional.dropout, functional.scaled_dot_product_attention


# Where dropout is by row


@contextlib.contextmanager
def dropout_by_row(lengths: tuple[int, ...] | None, places: tuple[int, ...] | None) -> Iterator[None]:
    """`row_lengths`; dropout is by row in the `with` block, unless `places` is None."""
    before = {name: getattr(functional, name) for name in (OURS if places is not None else ())}
    try:
        for name in before:
            setattr(functional, name, OURS[name])
        with row_lengths(lengths, places):
            yield
    finally:
        for name, function in before.items():
            setattr(functional, name, function)


def recomputing() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The `context_fn` of torch's `checkpoint`: layers are recomputed with the rows of their forward pass."""
    return nullcontext(), dropout_by_row(*current_rows())


def use_row_modules(model: nn.Module) -> None:
    """Replaces every stochastic depth in `model`, whose classes have this name in transformers and timm, and
    the dropout of DeBERTa's relative positions, which it normalizes before: that makes them no parameter.
    Parameters, state dict and configuration stay unchanged."""
    for module in model.modules():
        if type(module).__name__.endswith("DropPath") and hasattr(module, "drop_prob"):
            module.__class__ = DropPath
        elif isinstance(getattr(module, "pos_dropout", None), nn.Dropout):
            module.pos_dropout.__class__ = SharedDropout


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., arXiv 1603.09382): drops a layer's output (rows, ...) for some rows."""

    drop_prob: float | None

    def forward(self, hidden_states: Tensor) -> Tensor:
        ones = hidden_states.new_ones(len(hidden_states), *[1] * (hidden_states.dim() - 1))
        return hidden_states * functional.dropout(ones, self.drop_prob or 0.0, self.training)


class SharedDropout(nn.Dropout):
    """Dropout of a tensor that all rows share."""

    def forward(self, input: Tensor) -> Tensor:
        with row_lengths(None, current_rows().places and (SHARED,)):
            return super().forward(input)


# Masks


class DropoutMask(NamedTuple):
    """The random mask of one call of dropout."""

    call: int
    places: tuple[int, ...]  # of the rows
    dropped_levels: int  # of LEVELS: the dropout rate

    @classmethod
    def draw(cls, p: float) -> DropoutMask:
        """A mask of rate `p`, 0 < p < 1, for the current rows. Draws one number from torch's generator."""
        call = torch.randint(2**63 - 1, (), device="cpu")
        # In a dry run tensors have no values.
        call = 0 if isinstance(call, FakeTensor) else int(call)
        return cls(call, current_rows().places, min(round(p * LEVELS), LEVELS - 1))

    @property
    def scale(self) -> float:
        """The factor on kept elements."""
        return LEVELS / (LEVELS - self.dropped_levels)

    def fill(self, kept: Tensor) -> None:
        """Sets `kept` (uint8, contiguous) to 0 for dropped elements and 1 for kept ones."""
        if isinstance(kept, FakeTensor) or not kept.numel():
            return
        *sizes, last = kept.shape if kept.dim() > 1 else (kept.numel(), 1)
        keys, inner = self._layout(sizes)
        bits = 64 // (len(inner) + 1)
        strides = [INCREMENT << bits * (len(inner) - number) for number in range(len(inner))]
        fill = _fill_on_cpu if kept.device.type == "cpu" else _fill
        fill(kept.view(-1, last), keys, list(zip(inner, strides, strict=True)), self.dropped_levels)

    def keys(self, places: Sequence[int]) -> np.ndarray:
        """(places,) uint64."""
        keys = np.array(places, dtype=np.uint64) * _u64(INCREMENT) + _u64(self.call)
        _mix(keys, np.empty_like(keys))
        return keys

    def _layout(self, sizes: list[int]) -> tuple[np.ndarray, list[int]]:
        """(keys (n,) uint64, sizes of the dimensions of each key) for a mask that has these sizes before its
        last dimension. n times the sizes are the mask's, without the last."""
        (first, *inner), rows = sizes, len(self.places)
        if first == 1 < rows:
            return self.keys([SHARED]), inner
        if first % rows == 0:
            # Heads, images or windows of each row. The first has the row's own key, so that a row with one
            # window does not depend on whether another row has more.
            parts = np.arange(first // rows, dtype=np.uint64) * _u64(INCREMENT)
            keys = self.keys(self.places)[:, None] + parts
            further = np.ascontiguousarray(keys[:, 1:])
            _mix(further, np.empty_like(further))
            keys[:, 1:] = further
            return keys.reshape(-1), inner
        return self.keys_of_other_layout(), sizes

    def keys_of_other_layout(self) -> np.ndarray:
        """(1,) uint64."""
        return self.keys([OTHER + self.places[0]])


def _u64(number: int) -> np.uint64:
    return np.uint64(number % 2**64)


def _i64(number: int) -> int:
    """The same bits as a signed number: torch computes with these only."""
    return (number + 2**63) % 2**64 - 2**63


def _mix(words: np.ndarray, scratch: np.ndarray) -> None:
    """SplitMix64's mixing function, in place."""
    for shift, factor in ROUNDS:
        np.right_shift(words, _u64(shift), out=scratch)
        words ^= scratch
        if factor != 1:
            words *= _u64(factor)


def _fill_on_cpu(kept: Tensor, keys: np.ndarray, inner: list[tuple[int, int]], dropped_levels: int) -> None:
    """Fills `kept` (lines, elements of a line). `keys` (n,) uint64; `inner`: sizes and strides of the
    dimensions of each key, whose product with n is the number of lines."""
    for size, stride in inner:
        keys = keys[..., None] + np.arange(size, dtype=np.uint64) * _u64(stride)
    lines, elements = kept.shape
    words = np.arange(-(-elements // LANES), dtype=np.uint64) * _u64(INCREMENT)
    pieces = -(-lines * len(words) // WORDS_AT_ONCE)
    step, keys, filled = -(-lines // pieces), keys.reshape(-1), kept.numpy().view(np.bool_)

    def fill(first: int) -> None:
        random = keys[first : first + step, None] + words
        _mix(random, np.empty_like(random))
        levels = random.view(np.int16)[:, :elements]
        np.greater_equal(levels, dropped_levels - LEVELS // 2, out=filled[first : first + step])

    in_threads(fill, range(0, lines, step))


def _fill(kept: Tensor, keys: np.ndarray, inner: list[tuple[int, int]], dropped_levels: int) -> None:
    """`_fill_on_cpu` by torch operations on any device."""
    device, elements = kept.device, kept.shape[1]
    lines = send(torch.from_numpy(keys.view(np.int64)), device)
    for size, stride in inner:
        lines = lines[..., None] + torch.arange(size, device=device) * _i64(stride)
    words = torch.arange(-(-elements // LANES), device=device) * _i64(INCREMENT)
    step = max(1, WORDS_ON_GPU // len(words))
    for part, keys_of_part in zip(kept.split(step), lines.flatten().split(step), strict=True):
        random = keys_of_part[:, None] + words
        for shift, factor in ROUNDS:
            random ^= (random >> shift) & (2 ** (64 - shift) - 1)  # the shift repeats the sign
            random *= _i64(factor)
        part.copy_(random.view(torch.int16)[:, :elements] >= dropped_levels - LEVELS // 2)


# torch's functions


def is_active(p: float, training: bool = True) -> bool:
    return training and 0 < p < 1 and current_rows().places is not None


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.dropout` by row."""
    if not is_active(p, training):
        return torch_dropout(input, p, training, inplace)
    mask = DropoutMask.draw(p)
    if isinstance(input, nn.Parameter):
        mask = mask._replace(places=(SHARED,))
    result = _Dropout.apply(input, mask)
    return input.copy_(result) if inplace else result


def channel_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.dropout1d`, `2d` and `3d` by row, of (rows, channels, ...)."""
    factors = dropout(input.new_ones(*input.shape[:2], *[1] * (input.dim() - 2)), p, training)
    return input.mul_(factors) if inplace else input * factors


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: DropoutMask) -> Tensor:
        kept = torch.empty_like(x, dtype=torch.uint8, memory_format=torch.contiguous_format)
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
    # Multiplying by uint8 would be much slower, and so would a second tensor for the product.
    return kept.to(x.dtype).mul_(x).mul_(scale)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with dropout by row."""
    if not is_active(dropout_p):
        return torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return dropout_attention(query, key, value, attn_mask, DropoutMask.draw(dropout_p), scale)


OURS = {
    "dropout": dropout,
    "dropout1d": channel_dropout,
    "dropout2d": channel_dropout,
    "dropout3d": channel_dropout,
    "scaled_dot_product_attention": attention,
}  # by their names in torch.nn.functional


# Attention


WEIGHTS_AT_ONCE = 2**21
LOG2E = math.log2(math.e)

Place = tuple[slice, ...]  # rows and heads, or rows, heads and queries


def dropout_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: DropoutMask,
    scale: float | None = None,
) -> Tensor:
    """Attention of (rows, heads, tokens, size) with dropout.

    `mask` expands to (rows, heads, queries, keys): bool, true where a query sees a key, or a float to add to
    the scores.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # A dry run for a GPU is a torch function mode.
    on_cpu = query.device.type == "cpu" and not has_torch_function_unary(query)
    alike = query.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    if on_cpu and alike and not (mask is not None and mask.requires_grad):
        mask = None if mask is None else _compact(mask)
        with torch.autocast("cpu", enabled=False):
            return DropoutAttention.apply(query, key, value, mask, dropout, scale)
    scores = (query * scale) @ key.mT
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return _Dropout.apply(weights, dropout) @ value


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
    """Query (rows, heads, queries, size), key, value (rows, heads, keys, size) -> context as query.

    `mask`: None, or bool or float as in `dropout_attention`, (rows, heads, queries, keys) or 1 in any
    dimension. Half precision is computed in fp32, but for products (see `product_dtype`). A query that sees
    no key gets 0, as in torch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: DropoutMask,
        scale: float,
    ) -> Tensor:
        rows, heads, queries, _ = query.shape
        dtype, product = torch.promote_types(query.dtype, torch.float32), product_dtype(query.dtype)
        limits = torch.finfo(dtype)
        # Contiguous after transformers transposes heads and tokens.
        context = query.new_empty(rows, queries, heads, value.shape[-1]).transpose(1, 2)
        highest, total = (query.new_empty(rows, heads, queries, 1, dtype=dtype) for _ in range(2))
        kept = query.new_empty(rows, heads, queries, key.shape[2], dtype=torch.uint8)
        dropout.fill(kept)
        for pairs, chunks in _pieces(kept.shape):
            k, v = _take(key, pairs, product), _take(value, pairs, product)
            for chunk in chunks:
                place = (*pairs, chunk)
                scores = _scores(_take(query, place, product), k, scale, mask, place)
                top = scores.amax(dim=-1, keepdim=True).clamp_(min=limits.min)
                weights = scores.sub_(top).exp2_()
                sums = weights.sum(dim=-1, keepdim=True).clamp_(min=limits.tiny)
                weights = weights.to(product).mul_(_take(kept, place, product))
                out = torch.bmm(weights, v).to(dtype).mul_(dropout.scale / sums)
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
        dtype, product, scale = highest.dtype, product_dtype(query.dtype), ctx.scale
        for pairs, chunks in _pieces(kept.shape):
            k, v = _take(key, pairs, product), _take(value, pairs, product)
            d_k, d_v = torch.empty_like(k), torch.empty_like(v)
            for chunk in chunks:
                # The first chunk overwrites d_k and d_v, later ones add.
                place, beta = (*pairs, chunk), int(chunk.start > 0)
                top, sums, out, d_out = (_take(x, place, dtype) for x in (highest, total, context, gradient))
                q = _take(query, place, product)
                weights = _scores(q, k, scale, mask, place).sub_(top).exp2_()
                factors = _take(kept, place, dtype)
                # The softmax's gradient needs sum_j P_ij dP_ij of each query. It equals sum_d O_id dO_id,
                # also with dropout.
                delta = out.mul_(d_out).sum(dim=-1, keepdim=True)
                d_out.mul_(ctx.dropout_scale)
                d_weights = torch.bmm(d_out.to(product), v.mT).to(dtype)
                d_scores = torch.addcmul(delta.neg_(), d_weights, factors, out=d_weights).mul_(weights)
                d_scores = d_scores.to(product)
                _put(torch.bmm(d_scores, k).to(dtype).mul_(scale / sums), d_query, place)
                d_k.baddbmm_(d_scores.mT, (q * (scale / sums)).to(product), beta=beta)
                weights = weights.mul_(factors).to(product)
                d_v.baddbmm_(weights.mT, d_out.div_(sums).to(product), beta=beta)
            _put(d_k, d_key, pairs)
            _put(d_v, d_value, pairs)
        return d_query, d_key, d_value, None, None, None


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of attention's matrix products for inputs of `dtype`: fp32 for half precision, but bf16 where
    the CPU has instructions for it."""
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype if fast and dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)


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


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor | None, place: Place) -> Tensor:
    """The scores for powers of 2, in fp32 or more."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.bmm(q, k.mT).to(dtype).mul_(scale * LOG2E)
    if mask is not None:
        part = mask[
            tuple(cut if size > 1 else slice(1) for cut, size in zip(place, mask.shape, strict=False))
        ]
        if part.dtype == torch.bool:
            part = torch.zeros_like(part, dtype=torch.float32).masked_fill_(~part, -torch.inf)
        _, heads, _ = place
        scores.unflatten(0, (-1, heads.stop - heads.start)).add_(part, alpha=LOG2E)
    return scores
