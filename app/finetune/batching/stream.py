"""Training rows that are read while they are trained on, because all of them do not fit on the disk."""

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

from finetune.launching.signals import ignore_signals
from finetune.task import Split


class Stream(ABC):
    """Training rows in buffers: the rows of epoch k are buffer k, and each buffer has as many rows as the first.

    Where a buffer begins is known once the one before it was read. Checkpoints hold it, so that a resumed run reads nothing
    again that was trained on. A buffer is a function of where it begins: whoever does not find it on the disk reads it anew.
    """

    def __init__(self, second: Any) -> None:
        """`second`: where the second buffer begins; the first is the split that the stream belongs to."""
        self._starts = {1: second}
        self._requests: Connection | None = None  # to the process that reads ahead; None in processes without one

    @abstractmethod
    def read(self, epoch: int, start: Any) -> tuple[Split, Any]:
        """(The rows of an epoch, where those of the next one begin). `start`: where they begin; both can be written as JSON.

        What is expensive is left on the disk for the other processes of the machine. Raises `InputError` for rows that are
        wrong.
        """

    def remove(self, keeps: Callable[[int], bool]) -> None:
        """Removes from the disk what `read` left there, but for the epochs that `keeps` is true for."""
        return

    def start_reading_ahead(self) -> None:
        """Starts the process that reads each buffer before it is needed. Call it before there are a model and a process group:
        the fork would keep what it sees of them."""
        requests, self._requests = multiprocessing.Pipe(duplex=False)
        fork = multiprocessing.get_context("fork")
        fork.Process(target=self._read_ahead, args=(requests, self._requests), name="reads ahead", daemon=True).start()
        requests.close()

    def begin(self, epoch: int, start: Any) -> None:
        """The training will begin in this epoch. `start`: `start_of` that epoch, as the checkpoint has it; None for epoch 0."""
        if epoch > 0:
            self._starts[epoch] = start
        if self._requests is not None:  # what is left of a run that ended elsewhere
            self.remove(lambda number: number in (0, epoch, epoch + 1))

    def start_of(self, epoch: int) -> Any:
        """Where the rows of an epoch begin, once those of the one before were read; None for epoch 0."""
        return self._starts.get(epoch)

    def split(self, epoch: int) -> Split:
        """The rows of an epoch from 1 on."""
        for number in range(max(known for known in self._starts if known <= epoch), epoch + 1):
            split, self._starts[number + 1] = self.read(number, self._starts[number])
        return split

    def enter(self, epoch: int, is_last: bool) -> None:
        """The training is in this epoch, whose rows were read: forgets earlier ones, and has the next one's read. The first
        one's stay: a resumed run needs them for what it learns from the rows before it trains."""
        gc.collect()  # rows that are mapped into memory stay on the disk as long as an object knows them
        if self._requests is None:
            return
        self.remove(lambda number: number == 0 or number >= epoch)
        if not is_last:
            with contextlib.suppress(OSError):  # the process is gone: then the next buffer is read when it is needed
                self._requests.send((epoch + 1, self._starts[epoch + 1]))

    def close(self) -> None:
        """The training is done."""
        if self._requests is not None:
            self._requests.close()  # which ends the process
            self.remove(lambda number: False)

    def _read_ahead(self, requests: Connection, sending: Connection) -> None:
        sending.close()  # or the end of the training would go unnoticed
        self._requests = None
        nowhere = os.open(os.devnull, os.O_RDWR)
        for output in (1, 2):  # what is wrong with rows is said by the process that needs them
            os.dup2(nowhere, output)
        ignore_signals()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # what is there already stays, and need not be scanned
        with contextlib.suppress(EOFError):
            while True:
                epoch, start = requests.recv()
                with contextlib.suppress(Exception):
                    self.read(epoch, start)
                gc.collect()


def read_ahead(split: Split, local_rank: int) -> None:
    """Has one process of each machine read a stream ahead; does nothing for other rows."""
    if split.stream is not None and local_rank == 0:
        split.stream.start_reading_ahead()
