"""Runs pieces of work in threads, each on one CPU core.

If torch parallelised every operation instead, its threads would wait for each other after hundreds of small
operations. That costs little on a quiet machine, but a factor of ten when other processes compute too.

Replaces: torch's parallelism inside single operations.
Active: where the kernels for CPUs use it (`bigbird`, `dropout`).
Gain: 1.29 times (BigBird's attention at 2048 tokens, forward and backward on two threads: 188 ms before, 146
since; one thread takes 231: benchmarks/bench_cpu.md, remarks on "Attention").
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
    """Calls `work(piece)` for each piece without gradients, in as many threads as torch has. A single piece
    runs in the calling thread, with torch's own parallelism."""
    threads = torch.get_num_threads()
    pieces = list(pieces)
    # New threads do not inherit torch's modes.
    work = functools.partial(_work, work, torch.is_inference_mode_enabled())
    for _ in (
        map(work, pieces)
        if threads == 1 or len(pieces) == 1
        else _pool(os.getpid(), threads).map(work, pieces)
    ):
        pass


def _work(work: Callable[[Piece], None], inference: bool, piece: Piece) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        work(piece)


@functools.lru_cache(maxsize=1)
def _pool(process: int, number: int) -> ThreadPoolExecutor:
    """Threads in which torch is single-threaded. `process`: cache key, because threads do not survive a
    fork."""
    pool = ThreadPoolExecutor(number, thread_name_prefix="kernels")
    list(pool.map(_set_single_threaded, [threading.Barrier(number)] * number))
    torch.set_num_threads(number)  # the threads changed the default for later threads
    return pool


def _set_single_threaded(all_started: threading.Barrier) -> None:
    torch.get_num_threads()  # otherwise the thread's first operation resets the number (torch 2.13)
    torch.set_num_threads(1)
    all_started.wait()
