"""The lengths of the current batch's rows, on the host.

Kernels without padding, BigBird's attention and windows need the number of tokens. Reading it from a GPU
would make the host wait for all queued work. The collator has counted them already, so the engine sets the
lengths while it calls a task, and modules read them in their forward pass. They are not set in the backward
pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_LENGTHS: ContextVar[tuple[int, ...] | None] = ContextVar("lengths", default=None)


@contextlib.contextmanager
def row_lengths(lengths: tuple[int, ...] | None) -> Iterator[None]:
    """Sets `Batch.lengths` for the forward passes inside the `with` block."""
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def current_row_lengths(rows: int, width: int) -> tuple[int, ...] | None:
    """The lengths of a batch of this many rows, padded to `width`; None if they are unknown or do not fit its
    shape."""
    lengths = _LENGTHS.get()
    fits = lengths is not None and len(lengths) == rows and max(lengths, default=0) <= width
    return lengths if fits else None
