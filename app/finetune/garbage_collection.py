"""When Python looks for garbage in cycles: not over and over while libraries are imported and texts become lists. Level 0.

Python's collector looks through everything there is whenever that has grown by a quarter. Of what torch and transformers make
while they are imported, some four hundred thousand objects, next to nothing ever goes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

USUAL = gc.get_threshold()
# Of these three numbers of `gc.set_threshold` the first two leave it to look through what is new, the third never lets it look
# through everything.
WHILE_STARTING = (10_000, 10, 1_000_000)
_starting = False


def begin() -> None:
    """For a process that starts: until `settle` only what is new is looked through."""
    global _starting
    _starting = True
    gc.set_threshold(*WHILE_STARTING)


def settle() -> None:
    """From now on the collector works as usual, and without a look at what is there already: it stays. To be called before
    there is anything large, such as a model, that may have to go one day. Does nothing in a process without `begin`."""
    global _starting
    if _starting:
        _starting = False
        gc.freeze()
        gc.set_threshold(*USUAL)


@contextmanager
def paused() -> Iterator[None]:
    """For work that makes a million lists, none of them in a cycle: no collections meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
