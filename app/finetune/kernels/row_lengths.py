"""The lengths of the current batch's rows, as the host knows them.

Whoever computes without padding must know how many tokens are left. Asking a GPU makes the host wait for all work that it
queued before; the host itself counted the tokens when it collated them. So the engine sets the lengths while it calls a task,
and modules inside a model ask here, in their forward pass: a backward pass happens elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_LENGTHS: ContextVar[tuple[int, ...] | None] = ContextVar("lengths", default=None)


@contextlib.contextmanager
def row_lengths(lengths: tuple[int, ...] | None) -> Iterator[None]:
    """`lengths`: `Batch.lengths` of the batch that a model is about to see."""
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def current_row_lengths(rows: int, width: int) -> tuple[int, ...] | None:
    """The lengths of the `rows` rows that are padded to `width`; None if they are unknown, or another batch's."""
    lengths = _LENGTHS.get()
    fit = lengths is not None and len(lengths) == rows and max(lengths, default=0) <= width
    return lengths if fit else None
