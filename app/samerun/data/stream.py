"""Streaming: training rows are read during training, buffer by buffer, because they do not fit on the
disk."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from samerun.signals import ignore_signals
from samerun.task import Split


class Stream(ABC):
    """Training rows in buffers of equal size: epoch k trains on buffer k.

    Reading a buffer returns the start of the next one. Checkpoints contain the start, so a resumed run
    continues after the rows that were trained on. The start determines the rows of a buffer: a process
    without the cached buffer reads it again.
    """

    def __init__(self, second: Any) -> None:
        """`second`: the start of buffer 1. Buffer 0 is the split that the stream belongs to."""
        self._starts = {1: second}
        self._requests: Connection | None = None  # pipe to the read-ahead process, in its parent

    @abstractmethod
    def read(self, epoch: int, start: Any) -> tuple[Split, Any]:
        """Returns (rows of an epoch, start of the next epoch). `start`: of this epoch. Starts are JSON
        values.

        Cache expensive results on the disk for the other processes of the machine. Raises `InputError` for
        bad rows.
        """

    def remove(self, keeps: Callable[[int], bool]) -> None:
        """Removes the files that `read` cached, except those of epochs with `keeps(epoch)`."""
        return

    def start_reading_ahead(self) -> None:
        """Starts the process that reads each next buffer in advance. Call it before model and process group
        are created: the fork would keep copies of them."""
        requests, self._requests = multiprocessing.Pipe(duplex=False)
        fork = multiprocessing.get_context("fork")
        fork.Process(
            target=self._read_ahead, args=(requests, self._requests), name="read-ahead", daemon=True
        ).start()
        requests.close()

    def begin(self, epoch: int, start: Any) -> None:
        """Training starts or resumes in this epoch. `start`: its `start_of`, from the checkpoint; None for
        epoch 0."""
        if epoch > 0:
            self._starts[epoch] = start
        if self._requests is not None:  # remove leftovers of an interrupted run
            self.remove(lambda number: number in (0, epoch, epoch + 1))

    def start_of(self, epoch: int) -> Any:
        """The start of an epoch, if the epoch before it was read; None for epoch 0."""
        return self._starts.get(epoch)

    def split(self, epoch: int) -> Split:
        """The rows of an epoch >= 1. Reads the epochs before it if their starts are unknown."""
        for number in range(max(known for known in self._starts if known <= epoch), epoch + 1):
            split, self._starts[number + 1] = self.read(number, self._starts[number])
        return split

    def enter(self, epoch: int, is_last: bool) -> None:
        """Training enters this epoch, whose rows were read: removes earlier buffers and starts reading the
        next one.

        Buffer 0 stays: a resumed run prepares its task from it, such as the list of labels.
        """
        gc.collect()  # files stay on the disk while any object maps them into memory
        if self._requests is None:
            return
        self.remove(lambda number: number == 0 or number >= epoch)
        if not is_last:
            with contextlib.suppress(OSError):  # if the process died, the next buffer is read on demand
                self._requests.send((epoch + 1, self._starts[epoch + 1]))

    def close(self) -> None:
        """Training has ended: ends the read-ahead process and removes all buffers."""
        if self._requests is not None:
            self._requests.close()  # the process ends at the end of its input
            self.remove(lambda number: False)

    def _read_ahead(self, requests: Connection, sending: Connection) -> None:
        sending.close()  # an open copy would keep `recv` from seeing the end of the training
        self._requests = None
        null_device = os.open(os.devnull, os.O_RDWR)
        for output in (1, 2):  # the training process reports bad rows when it needs them
            os.dup2(null_device, output)
        ignore_signals()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # collections below need not scan the parent's objects
        with contextlib.suppress(EOFError):
            while True:
                epoch, start = requests.recv()
                with contextlib.suppress(Exception):
                    self.read(epoch, start)
                gc.collect()


def read_ahead(split: Split, local_rank: int) -> None:
    """Starts reading ahead, once per machine, if the split is a stream."""
    if split.stream is not None and local_rank == 0:
        split.stream.start_reading_ahead()
