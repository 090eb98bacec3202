"""What the kernels share: the current batch's rows, copies to a GPU.

Rows: BigBird's attention and windows need the number of tokens. Reading it from a GPU would make the host
wait for all queued work. The collator has counted them already, so the engine sets the lengths while it calls
a task, and modules read them in their forward pass. In training it also sets each row's place in the global
batch, of which dropout by row is a function. Both are set again where the backward pass recomputes layers
(`dropout.recomputing`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor


class BatchRows(NamedTuple):
    """The rows of a micro-batch. `lengths`: tokens of each, None if they are unknown; `places`: of each in
    the global batch, None outside of training and with torch's dropout."""

    lengths: tuple[int, ...] | None = None
    places: tuple[int, ...] | None = None


UNKNOWN = BatchRows()
_ROWS: ContextVar[BatchRows] = ContextVar("rows", default=UNKNOWN)


@contextlib.contextmanager
def row_lengths(lengths: tuple[int, ...] | None, places: tuple[int, ...] | None = None) -> Iterator[None]:
    """Sets the rows (`Batch.lengths` and `Batch.places`) for the forward passes inside the `with` block."""
    token = _ROWS.set(BatchRows(lengths, places))
    try:
        yield
    finally:
        _ROWS.reset(token)


def current_rows() -> BatchRows:
    return _ROWS.get()


def current_row_lengths(rows: int, width: int) -> tuple[int, ...] | None:
    """The lengths of a batch of so many rows, padded to `width`; None if unknown or of another shape."""
    lengths = _ROWS.get().lengths
    fits = lengths is not None and len(lengths) == rows and max(lengths, default=0) <= width
    return lengths if fits else None


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to `device` without waiting. A plain `.to("cuda")` waits until the GPU has
    finished all queued work; a copy from pinned memory is queued."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
