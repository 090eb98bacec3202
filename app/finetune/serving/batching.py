"""Requests that arrive together are predicted together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from finetune.errors import InputError


class Waiting(NamedTuple):
    """An item and who waits for its answer."""

    item: Any
    answer: asyncio.Future


class Batches:
    """A bounded queue and the one thread that the model computes in.

    While it computes, items wait; then up to `max_batch` of them are taken at once. `max_wait`: seconds for which a batch that
    is not full waits for more.
    """

    def __init__(self, predict: Callable[[list], Sequence], max_batch: int, max_wait: float, queue_size: int) -> None:
        """`predict`: items -> an answer for each; raises for all of them if one is wrong."""
        self._predict, self._max_batch, self._max_wait = predict, max_batch, max_wait
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(queue_size)

    def __len__(self) -> int:
        """How many items wait."""
        return self._queue.qsize()

    def submit(self, items: Sequence[Any]) -> list[asyncio.Future]:
        """The future answers of all of them. Raises `asyncio.QueueFull` if there is no room for all."""
        if len(self) + len(items) > self._queue.maxsize:
            raise asyncio.QueueFull
        waiting = [Waiting(item, asyncio.get_running_loop().create_future()) for item in items]
        for each in waiting:
            self._queue.put_nowait(each)
        return [each.answer for each in waiting]

    async def run(self) -> None:
        """Answers until it is cancelled."""
        with ThreadPoolExecutor(1, "model") as thread:
            while True:
                batch = await self._next()
                answers = await asyncio.get_running_loop().run_in_executor(thread, self._answers, [each.item for each in batch])
                for each, answer in zip(batch, answers, strict=True):
                    if each.answer.cancelled():
                        continue  # who asked has gone
                    if isinstance(answer, Exception):
                        each.answer.set_exception(answer)
                    else:
                        each.answer.set_result(answer)

    async def _next(self) -> list[Waiting]:
        batch = [await self._queue.get()]
        try:
            async with asyncio.timeout(self._max_wait):
                while len(batch) < self._max_batch:
                    batch.append(await self._queue.get())
        except TimeoutError:
            pass
        return batch

    def _answers(self, items: list[Any]) -> list[Any]:
        """An answer or an exception for each: what is wrong with one item is no other's fault."""
        try:
            return list(self._predict(items))
        except Exception as error:
            if len(items) > 1:
                return [self._answers([item])[0] for item in items]
            return [error if isinstance(error, InputError) else RuntimeError(f"{type(error).__name__}: {error}")]
