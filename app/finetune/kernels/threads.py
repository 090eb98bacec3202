"""Pieces of work for a CPU's cores, each of which computes alone.

Were every operation shared out instead, the cores would wait for each other after each of hundreds of small ones: hardly felt
on a quiet machine, ten times slower where other processes compute too.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Piece = TypeVar("Piece")


def in_threads(work: Callable[[Piece], None], pieces: Iterable[Piece]) -> None:
    """Calls `work(piece)` for each piece, without gradients, in as many threads as torch has. A single piece has all cores."""
    threads = torch.get_num_threads()
    pieces = list(pieces)
    if threads == 1 or len(pieces) == 1:
        for piece in pieces:
            with torch.no_grad():
                work(piece)
        return
    # Threads start with modes of their own.
    inference = torch.is_inference_mode_enabled()

    def one(piece: Piece) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work(piece)

    for _ in pool_of(os.getpid(), threads).map(one, pieces):
        pass


@functools.lru_cache(maxsize=1)
def pool_of(process: int, number: int) -> ThreadPoolExecutor:
    """Threads in each of which torch uses one core. `process`: threads do not survive a fork, so a child needs its own."""
    pool, met = ThreadPoolExecutor(number, thread_name_prefix="cores"), threading.Barrier(number)

    def prepare(_: int) -> None:
        torch.get_num_threads()  # or the thread's first operation would take the process's number (torch 2.13)
        torch.set_num_threads(1)
        met.wait()

    list(pool.map(prepare, range(number)))
    torch.set_num_threads(number)  # the number is also the default of threads to come: put it back
    return pool
