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
the last dimension. Integers only, so numba and torch compute the same bits on any device. The dropout rate is
rounded to a multiple of 2**-16, and the scale follows the rounded rate, so the expectation is exactly the
input.

Layouts: the first dimension has the rows of the micro-batch, or so many heads, images or windows of each row.
A parameter, or a tensor of one row in a micro-batch of several, is shared by all rows and micro-batches, and
so is its mask. Any other tensor has a mask of its own in each micro-batch; `samerun parity` names it.

On a CPU masks are drawn again in the backward pass, and attention's weights are computed again (as in
FlashAttention, arXiv 2205.14135, algorithm 4), in pieces: some rows, some heads of one row, or some queries
of one head. What is no matrix product is compiled (`kernels/loops.py`). In bf16 the products are in bf16 if
the CPU has instructions for them, all else is in fp32. On a GPU, attention with dropout stores all weights,
as transformers' eager attention does. Float64 and a mask that is trained are computed so on a CPU, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from samerun.kernels.common import current_rows, in_threads, on_cpu, row_lengths, send, slices

LEVELS = 2**16
LANES = 4  # elements of a word, which has 64 random bits
ELEMENTS_AT_ONCE = 2**18  # of a thread
WORDS_AT_ONCE = 2**22
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

    def drop(self, x: Tensor) -> Tensor:
        """`x` with dropout; on a CPU."""
        wide = x.float() if x.dtype == torch.float16 else x
        out = torch.empty_like(wide, memory_format=torch.contiguous_format)
        if isinstance(x, FakeTensor) or not x.numel():
            return out.to(x.dtype)
        *sizes, last = x.shape if x.dim() > 1 else (x.numel(), 1)
        keys, inner = self._layout(sizes)
        lines = (keys[:, None] + _offsets(*inner)).reshape(-1)
        source, target = (loops().array(tensor.reshape(-1, last)) for tensor in (wide.detach(), out))
        number = np.float64 if x.dtype == torch.float64 else np.float32
        numbers = np.int16(self.threshold), number(self.scale)

        def drop(part: slice) -> None:
            loops().drop(source[part], target[part], lines[part], *numbers)

        in_threads(drop, slices(len(lines), max(1, ELEMENTS_AT_ONCE // last)))
        return out.to(x.dtype)

    def fill(self, kept: Tensor) -> None:
        """Sets `kept` (uint8, contiguous) to 0 for dropped elements and 1 for kept ones, by torch operations
        on any device."""
        if isinstance(kept, FakeTensor) or not kept.numel():
            return
        *sizes, last = kept.shape if kept.dim() > 1 else (kept.numel(), 1)
        keys, inner = self._layout(sizes)
        lines = send(torch.from_numpy(keys.view(np.int64)), kept.device)
        for size, stride in zip(inner, _strides(inner), strict=True):
            lines = lines[..., None] + torch.arange(size, device=kept.device) * _i64(stride)
        words = torch.arange(-(-last // LANES), device=kept.device) * _i64(INCREMENT)
        step = max(1, WORDS_AT_ONCE // len(words))
        parts = kept.view(-1, last).split(step)
        for part, keys_of_part in zip(parts, lines.flatten().split(step), strict=True):
            random = keys_of_part[:, None] + words
            for shift, factor in ROUNDS:
                random ^= (random >> shift) & (2 ** (64 - shift) - 1)  # the shift repeats the sign
                random *= _i64(factor)
            part.copy_(random.view(torch.int16)[:, :last] >= self.threshold)

    def attention_keys(self, sizes: Sequence[int]) -> tuple[np.ndarray, int]:
        """(keys of the first queries (rows, heads) uint64, what to add from query to query) for `sizes`
        (rows, heads)."""
        keys, inner = self._layout([*sizes, 1])  # one query
        return (keys[:, None] + _offsets(*inner)).reshape(sizes), _strides(inner)[-1]

    @property
    def threshold(self) -> int:
        """Elements whose random int16 is below it are dropped."""
        return self.dropped_levels - LEVELS // 2

    def keys(self, places: Sequence[int]) -> np.ndarray:
        """(places,) uint64."""
        keys = np.array(places, dtype=np.uint64) * _u64(INCREMENT) + _u64(self.call)
        _mix(keys, np.empty_like(keys))
        return keys

    def _layout(self, sizes: list[int]) -> tuple[np.ndarray, list[int]]:
        """(keys (n,) uint64, sizes of the dimensions of each key) for a mask that has these sizes before its
        last dimension. n times the sizes are the mask's, without the last."""
        (first, *inner), rows = sizes, len(self.places)
        if first == rows:
            return self.keys(self.places), inner
        if first == 1:
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


@functools.cache
def loops() -> ModuleType:
    """`kernels/loops.py`. Numba takes half a second to import, which only training needs."""
    from samerun.kernels import loops

    return loops


def _strides(inner: Sequence[int]) -> list[int]:
    """What to add to a key for each index of a dimension."""
    bits = 64 // (len(inner) + 1)
    return [INCREMENT << bits * (len(inner) - number) for number in range(len(inner))]


@functools.lru_cache(16)  # as many as the kinds of dropout in a forward pass
def _offsets(*inner: int) -> np.ndarray:
    """(lines,) uint64: what to add to a key for the lines of a mask with these dimensions of each key."""
    offsets = np.zeros(1, dtype=np.uint64)
    for size, stride in zip(inner, _strides(inner), strict=True):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.uint64) * _u64(stride)).reshape(-1)
    return offsets


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
        ctx.mask = mask
        if on_cpu(x):
            return mask.drop(x)
        kept = torch.empty_like(x, dtype=torch.uint8, memory_format=torch.contiguous_format)
        mask.fill(kept)
        ctx.save_for_backward(kept)
        return _apply(x, kept, mask.scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        saved = ctx.saved_tensors  # under checkpointing they can be read once only
        if not saved:
            return ctx.mask.drop(gradient), None
        return _apply(gradient, *saved, ctx.mask.scale), None


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


WEIGHTS_AT_ONCE = 2**20  # of a thread
FEW_WEIGHTS = 2**19  # for which it does not pay to wake a thread
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
    alike = query.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    learned = mask is not None and mask.requires_grad
    if on_cpu(query) and query.dtype != torch.float64 and alike and not learned:
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
        product = product_dtype(query.dtype)
        arguments_of = _loop_arguments(query, key, mask, dropout, scale)
        # Contiguous after transformers transposes heads and tokens.
        context = query.new_empty(rows, queries, heads, value.shape[-1]).transpose(1, 2)
        logarithms = query.new_empty(rows, heads, queries, dtype=torch.float32)

        def attend(pairs: Place, chunks: list[slice]) -> None:
            k, v = _take(key, pairs, product), _take(value, pairs, product)
            for chunk in chunks:
                place = (*pairs, chunk)
                weights = torch.bmm(_take(query, place, product), k.mT)
                if arguments_of:
                    loops().weigh(_by_head(weights, place), *arguments_of(place), logarithms[place].numpy())
                _put(torch.bmm(weights, v), context, place)

        _in_pieces(attend, query, key)
        ctx.save_for_backward(query, key, value, mask, logarithms, context)
        ctx.dropout, ctx.scale = dropout, scale
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        query, key, value, mask, logarithms, context = ctx.saved_tensors
        d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
        product = product_dtype(query.dtype)
        arguments_of = _loop_arguments(query, key, mask, ctx.dropout, ctx.scale)

        def differentiate(pairs: Place, chunks: list[slice]) -> None:
            k, v = _take(key, pairs, product), _take(value, pairs, product)
            d_k, d_v = torch.empty_like(k), torch.empty_like(v)
            for chunk in chunks:
                # The first chunk overwrites d_k and d_v, later ones add.
                place, beta = (*pairs, chunk), int(chunk.start > 0)
                q, d_out = _take(query, place, product), _take(gradient, place, product)
                # The softmax's gradient needs sum_j P_ij dP_ij of each query. It equals sum_d O_id dO_id,
                # also with dropout.
                delta = (context[place].float() * gradient[place].float()).sum(dim=-1).contiguous()
                weights, d_scores = torch.bmm(q, k.mT), torch.bmm(d_out, v.mT)
                if arguments_of:
                    arrays = *(_by_head(x, place) for x in (weights, d_scores)), delta.numpy()
                    loops().differentiate(*arrays, *arguments_of(place), logarithms[place].numpy())
                _put(torch.bmm(d_scores, k), d_query, place)
                d_k.baddbmm_(d_scores.mT, q, beta=beta)
                d_v.baddbmm_(weights.mT, d_out, beta=beta)
            _put(d_k, d_key, pairs)
            _put(d_v, d_value, pairs)

        _in_pieces(differentiate, query, key)
        return d_query, d_key, d_value, None, None, None


def _loop_arguments(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout: DropoutMask, scale: float
) -> Callable[[Place], tuple] | None:
    """A function of a place to the arguments `bias` to `factor` of `loops.weigh`; None in a dry run."""
    if isinstance(query, FakeTensor):
        return None
    if mask is None:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    bias = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask.float() * LOG2E
    bias = bias.expand(*bias.shape[:-1], key.shape[2]).contiguous()
    lines = torch.arange(bias[..., 0].numel()).view(bias.shape[:-1]).expand(query.shape[:-1]).numpy()
    lines_of_bias = bias.flatten(0, -2).numpy()
    keys, stride = dropout.attention_keys(query.shape[:2])
    numbers = _u64(stride), np.int16(dropout.threshold), np.float32(dropout.scale)

    def arguments_of(place: Place) -> tuple:
        rows, heads, queries = place
        own = keys[rows, heads] + _u64(queries.start * stride)
        return lines_of_bias, lines[place], np.float32(scale * LOG2E), own, *numbers

    return arguments_of


def _by_head(x: Tensor, place: Place) -> np.ndarray:
    """(rows x heads, ...) as an array (rows, heads, ...)."""
    return loops().array(x.unflatten(0, (-1, place[1].stop - place[1].start)))


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of attention's matrix products for inputs of `dtype`: fp32 for half precision, but bf16 where
    the CPU has instructions for it."""
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype if fast and dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)


def _in_pieces(work: Callable[[Place, list[slice]], None], query: Tensor, key: Tensor) -> None:
    """Calls `work` with each piece's (rows, heads) and its chunks of queries, in threads."""
    (rows, heads, queries, _), keys = query.shape, key.shape[2]
    threads = torch.get_num_threads() if rows * heads * queries * keys > FEW_WEIGHTS else 1
    step = min(max(1, WEIGHTS_AT_ONCE // (queries * keys)), -(-rows * heads // threads))
    chunks = slices(queries, max(1, WEIGHTS_AT_ONCE // keys))
    row_step, head_step = max(1, step // heads), min(step, heads)
    pieces = list(itertools.product(slices(rows, row_step), slices(heads, head_step)))
    if isinstance(query, FakeTensor):  # Other threads do not have its mode.
        work(pieces[0], chunks)
    else:
        in_threads(lambda piece: work(piece, chunks), pieces)


def _take(x: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
    """A contiguous copy of a part of (rows, heads, tokens, size), as (rows x heads, tokens, size)."""
    part = x[place]
    return x.new_empty(part.shape, dtype=dtype).copy_(part).flatten(0, 1)


def _put(part: Tensor, whole: Tensor, place: Place) -> None:
    whole[place].copy_(part.view(whole[place].shape))
