"""A thread that writes files while training continues."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_all: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """Runs one job at a time in a thread. Jobs must not use the process group: training uses it at the same
    time."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "background work")
        self._job: Future | None = None
        _all.add(self)

    def start(self, job: Callable[[], None]) -> None:
        """Waits for the previous job, raises its error if it failed, and starts this one."""
        self.wait()
        self._job = self.thread.submit(job)

    def wait(self) -> None:
        """Waits for the running job; raises its error, once."""
        job, self._job = self._job, None
        if job is not None:
            job.result()


def finish_all() -> None:
    """Waits for all running jobs, whether they succeed or not. For a process that is about to exit."""
    for writer in list(_all):
        writer.thread.shutdown()
