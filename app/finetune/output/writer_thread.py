"""A thread that writes while the run goes on: one piece of work at a time, whose error is raised where the run next looks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_exiting = threading.Event()
_all: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """At most one piece of work in flight. Work must not use the process group: the run uses it meanwhile."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "background work")
        self._work: Future | None = None
        self._hurried = threading.Event()
        _all.add(self)

    def start(self, work: Callable[[], None]) -> None:
        """Waits for the piece before, raises its error if it had one, and begins this one."""
        self.wait()
        self._hurried.clear()
        self._work = self.thread.submit(work)

    def wait(self) -> None:
        """Waits until nothing is in flight; raises the error of what was, once."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def hurry(self) -> None:
        """Tells the work in flight that what it waits for has come, or will not come."""
        self._hurried.set()

    def is_hurried(self) -> bool:
        """Whether work that waits for another process should finish soon: after `hurry`, or before this process exits."""
        return self._hurried.is_set() or _exiting.is_set()


def finish_all() -> None:
    """Waits for all work in flight, whether it succeeds or not; for a process that is about to exit."""
    _exiting.set()
    for writer in list(_all):
        writer.thread.shutdown()
