"""Dynamic batching: requests that wait at the same time are predicted in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from samerun.errors import InputError


class QueuedItem(NamedTuple):
    """An item with the future of its result."""

    item: Any
    future: asyncio.Future


class BatchQueue:
    """A bounded queue of items that `thread` works on, up to `max_batch` at once.

    Queues that share a thread take turns. `max_wait`: seconds that an incomplete batch waits for more items.
    """

    def __init__(
        self,
        predict: Callable[[list], Sequence],
        thread: ThreadPoolExecutor,
        *,
        max_batch: int,
        max_wait: float,
        queue_size: int,
    ) -> None:
        """`predict`: items -> a result for each; raises if one of them is wrong."""
        self._predict, self._thread = predict, thread
        self._max_batch, self._max_wait = max_batch, max_wait
        self._queue: asyncio.Queue[QueuedItem] = asyncio.Queue(queue_size)

    def __len__(self) -> int:
        """The number of waiting items."""
        return self._queue.qsize()

    def submit(self, items: Sequence[Any]) -> list[asyncio.Future]:
        """Queues the items and returns the futures of their results. Raises `asyncio.QueueFull` without room
        for all."""
        if len(self) + len(items) > self._queue.maxsize:
            raise asyncio.QueueFull
        futures = [asyncio.get_running_loop().create_future() for _ in items]
        for item, future in zip(items, futures, strict=True):
            self._queue.put_nowait(QueuedItem(item, future))
        return futures

    async def run(self) -> None:
        """Processes batches until it is cancelled."""
        while True:
            batch = await self._next_batch()
            batch = [queued for queued in batch if not queued.future.cancelled()]  # its client has gone
            items = [queued.item for queued in batch]
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._results, items)
            for queued, result in zip(batch, results, strict=True):
                if queued.future.cancelled():
                    continue
                if isinstance(result, Exception):
                    queued.future.set_exception(result)
                else:
                    queued.future.set_result(result)

    async def _next_batch(self) -> list[QueuedItem]:
        batch = [await self._queue.get()]
        try:
            async with asyncio.timeout(self._max_wait):
                while len(batch) < self._max_batch:
                    batch.append(await self._queue.get())
        except TimeoutError:
            pass
        return batch

    def _results(self, items: list[Any]) -> list[Any]:
        """A result or an exception for each item. The items of a failing batch are predicted one by one, so
        that one bad item does not fail the others."""
        try:
            return list(self._predict(items)) if items else []
        except Exception as error:
            if len(items) > 1:
                return [self._results([item])[0] for item in items]
            if not isinstance(error, InputError):
                cause, error = error, RuntimeError(f"{type(error).__name__}: {error}")
                error.__cause__ = cause  # a future takes no StopIteration
            return [error]
