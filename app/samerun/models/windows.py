"""Turns a classifier of windows into one of documents, by pooling the logits of each document's windows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput

from samerun.kernels.common import current_row_lengths, current_rows, row_lengths, send


def pool_windows(model: Any, window: int, pooling: str, side: str) -> Any:
    """Replaces `model.forward`: `input_ids` and `attention_mask` (documents, windows, width) -> pooled logits
    (documents, labels). Parameters and state dict stay.

    Documents with fewer windows end with empty ones, which are not computed. `window`: tokens of every window
    but a document's last; `pooling`: max or mean; `side`: padding side.
    """
    model.forward = functools.partial(_document_logits, model.forward, window, pooling, side)
    return model


def _document_logits(
    forward: Callable, window: int, pooling: str, side: str, input_ids: Tensor, attention_mask: Tensor
) -> SequenceClassifierOutput:
    documents, most, width = input_ids.shape
    # Lengths counted on the CPU avoid a synchronisation with the GPU.
    lengths = current_row_lengths(documents, most * width) or attention_mask.sum((1, 2)).tolist()
    window_lengths = [
        [min(window, length - first) for first in range(0, max(1, length), window)] for length in lengths
    ]
    numbers = [(row, number) for row, windows in enumerate(window_lengths) for number in range(len(windows))]
    index = send(torch.tensor([row * most + number for row, number in numbers]), input_ids.device)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    inputs = {name: tensor.flatten(0, 1).index_select(0, index) for name, tensor in inputs.items()}
    flat_lengths = tuple(length for windows in window_lengths for length in windows)
    known_lengths = flat_lengths if side == "right" and min(flat_lengths) > 0 else None
    places = current_rows().places
    if places is not None:  # a window's place, for dropout by row
        places = tuple(places[row] + number * 2**32 for row, number in numbers)
    with row_lengths(known_lengths, places):
        logits = forward(**inputs).logits
    empty = logits.new_full((documents * most, logits.shape[-1]), -torch.inf if pooling == "max" else 0.0)
    grid = empty.index_copy(0, index, logits).unflatten(0, (documents, most))
    if pooling == "max":
        return SequenceClassifierOutput(logits=grid.amax(dim=1))
    counts = send(torch.tensor([[len(windows)] for windows in window_lengths]), logits.device)
    return SequenceClassifierOutput(logits=grid.sum(dim=1) / counts)
