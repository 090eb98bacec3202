"""Python's garbage collection, held back while libraries are imported and texts become lists.

The gc scans all objects whenever their number has grown by a quarter. torch and transformers create four hundred thousand while
they are imported, of which almost none is ever freed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

USUAL = gc.get_threshold()
# Young objects are scanned as usual; the third number prevents full scans.
WHILE_STARTING = (10_000, 10, 1_000_000)
_starting = False


def begin() -> None:
    """For a starting process: until `settle`, only young objects are scanned."""
    global _starting
    _starting = True
    gc.set_threshold(*WHILE_STARTING)


def settle() -> None:
    """From now on gc works as usual, but never scans the objects that exist already: they stay. Call it before there is
    anything large, such as a model, that may be freed one day. Does nothing in a process without `begin`."""
    global _starting
    if _starting:
        _starting = False
        gc.freeze()
        gc.set_threshold(*USUAL)


@contextmanager
def paused() -> Iterator[None]:
    """No collections meanwhile: for work that creates a million lists, none of them in a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
