"""Suspends Python's garbage collection during imports and tokenization.

The gc scans all objects whenever their number has grown by a quarter. Importing torch and transformers
creates 400,000 objects, almost none of which is ever freed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

USUAL = gc.get_threshold()
# The third number prevents full scans; young objects are still scanned.
WHILE_STARTING = (10_000, 10, 1_000_000)
_starting = False


def begin() -> None:
    """Prevents full scans until `settle`. Call it when the process starts."""
    global _starting
    _starting = True
    gc.set_threshold(*WHILE_STARTING)


def settle() -> None:
    """Restores usual collections, but exempts all existing objects from them forever. Call it before the
    process creates large objects that may be freed later, such as a model. Does nothing without `begin`."""
    global _starting
    if _starting:
        _starting = False
        gc.freeze()
        gc.set_threshold(*USUAL)


@contextmanager
def paused() -> Iterator[None]:
    """Disables collections, for code that creates millions of lists without reference cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
