"""A thread that writes while the run goes on: one piece of work at a time, whose error is raised where the run next looks."""

from __future__ import annotations

import threading
from collections.abc import Callable

THREAD_NAME = "background work"
_exiting = threading.Event()


class Background:
    """At most one piece of work in flight. Work must not use the process group: the run uses it meanwhile."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._hurried = threading.Event()

    def start(self, work: Callable[[], None]) -> None:
        """Waits for the piece before, raises its error if it had one, and begins this one."""
        self.wait()
        self._hurried.clear()
        self._thread = threading.Thread(target=self._do, args=(work,), name=THREAD_NAME)
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is in flight; raises the error of what was."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def hurry(self) -> None:
        """Tells the work in flight that what it waits for has come, or will not come."""
        self._hurried.set()

    def is_hurried(self) -> bool:
        """Whether work that waits for another process should finish soon: after `hurry`, or before this process exits."""
        return self._hurried.is_set() or _exiting.is_set()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error


def finish_all() -> None:
    """Waits for all work in flight, whether it succeeds or not; for a process that is about to exit."""
    _exiting.set()
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()
