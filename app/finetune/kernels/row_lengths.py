"""How long the rows of the batch at hand are, as the host knows it. Level 1.

Whoever leaves padding out must know how many tokens are left. A GPU that is asked makes the host wait for everything it was
given before; the host itself counted the tokens when it collated them. So the engine says how long the rows are while it calls
a task's verbs, and what is inside a model asks here - in its forward pass: a backward pass happens elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_LENGTHS: ContextVar[tuple[int, ...] | None] = ContextVar("lengths", default=None)


@contextlib.contextmanager
def known(lengths: tuple[int, ...] | None) -> Iterator[None]:
    """`lengths`: `Batch.lengths` of the batch that a model is about to see."""
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def known_lengths(rows: int, width: int) -> tuple[int, ...] | None:
    """The lengths of the `rows` rows that are padded to `width`; None if nobody said, or spoke of another batch."""
    lengths = _LENGTHS.get()
    fit = lengths is not None and len(lengths) == rows and max(lengths, default=0) <= width
    return lengths if fit else None
