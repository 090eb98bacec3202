"""What a mask adds to attention's scores, made once for all layers that are given the same mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class Bias:
    values: Tensor  # expands to (rows, heads, queries, keys)
    rows: list[bool]  # whether a row has others than 0: of the rows of a batch many are as long as the longest

    def of(self, rows: slice, heads: slice, queries: slice) -> Tensor | None:
        """What is to be added to a part of the scores, in a shape that expands to theirs."""
        part = (rows, heads, queries)
        if not any(self.rows[rows if len(self.rows) > 1 else slice(1)]):
            return None
        return self.values[tuple(cut if size > 1 else slice(1) for cut, size in zip(part, self.values.shape, strict=False))]


def bias_of(mask: Tensor) -> Bias:
    """Of a mask that expands to (rows, heads, queries, keys): bool, true where a query sees a key, or what is to be added."""
    if mask.dtype != torch.bool or mask.is_inference():
        return _bias(mask)
    version, bias = _made.get(mask, (-1, None))
    if bias is None or version != mask._version:
        _made[mask] = mask._version, (bias := _bias(mask))
    return bias


_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # bool mask -> its version, its bias


def _bias(mask: Tensor) -> Bias:
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask[tuple(slice(None) if stride else slice(1) for stride in mask.stride())]
    without_values = isinstance(mask, FakeTensor)  # in a rehearsal of the memory (finetune.memory_estimate)
    if mask.dtype == torch.bool:
        # transformers writes which keys are real out for every query.
        if without_values or torch.equal(mask, mask[:, :, :1].expand_as(mask)):
            mask = mask[:, :, :1]
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    return Bias(mask, [] if without_values else mask.flatten(1).any(dim=1).tolist())
