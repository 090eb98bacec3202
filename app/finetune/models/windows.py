"""A classifier of windows as a classifier of documents: its windows go through the model together, their logits are pooled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput

from finetune.kernels.row_lengths import current_row_lengths, row_lengths
from finetune.kernels.transfer import send


def pool_windows(model: Any, window: int, pooling: str, side: str) -> Any:
    """Has `model` take the windows of documents and give the documents' logits; parameters and state dict stay as they are.

    It takes `input_ids` and `attention_mask`, (documents, windows, width) both, where documents of fewer windows end with empty
    ones, which are not computed. `window`: tokens of every window but a document's last; `pooling`: max or mean of a document's
    windows; `side`: where windows are padded.
    """
    model.forward = functools.partial(_document_logits, model.forward, window, pooling, side)
    return model


def _document_logits(
    forward: Callable, window: int, pooling: str, side: str, input_ids: Tensor, attention_mask: Tensor
) -> SequenceClassifierOutput:
    documents, most, width = input_ids.shape
    # As the host counted them: a GPU is not asked.
    lengths = current_row_lengths(documents, most * width) or attention_mask.sum((1, 2)).tolist()
    windows = [[min(window, length - first) for first in range(0, max(1, length), window)] for length in lengths]
    places = [row * most + number for row, each in enumerate(windows) for number in range(len(each))]
    place = send(torch.tensor(places), input_ids.device)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    inputs = {name: tensor.flatten(0, 1).index_select(0, place) for name, tensor in inputs.items()}
    of_windows = tuple(length for each in windows for length in each)
    with row_lengths(of_windows if side == "right" and min(of_windows) > 0 else None):
        logits = forward(**inputs).logits
    empty = logits.new_full((documents * most, logits.shape[-1]), -torch.inf if pooling == "max" else 0.0)
    grid = empty.index_copy(0, place, logits).unflatten(0, (documents, most))
    if pooling == "max":
        return SequenceClassifierOutput(logits=grid.amax(dim=1))
    counts = send(torch.tensor([[len(each)] for each in windows]), logits.device)
    return SequenceClassifierOutput(logits=grid.sum(dim=1) / counts)
