"""Python's search for garbage, kept away from data sets. Level 1."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For reading data: no search while rows come in, and none among them afterwards.

    A million rows are millions of objects, all of them alive. Searching them for cycles took a fifth of the reading time,
    and would come back in the midst of training.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
