"""Pieces of work for a CPU's threads, each of which computes alone.

Were every operation shared out instead, the threads would wait for each other after each of hundreds of small ones: hardly felt
on a quiet machine, ten times slower where other processes compute too.

Replaces: torch's threads inside single operations.
Active: where the kernels for CPUs use it (`bigbird`, `dropout`).
Gain: 1.29 times (BigBird's attention at 2048 tokens, forward and backward on two threads: 188 ms before, 146 since; one thread
takes 231: benchmarks/bench_cpu.md, remarks on "Attention").
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
    """Calls `work(piece)` for each piece, without gradients, in as many threads as torch has. A single piece has them all."""
    threads = torch.get_num_threads()
    pieces = list(pieces)
    # Threads start with modes of their own.
    work = functools.partial(_work, work, torch.is_inference_mode_enabled())
    for _ in map(work, pieces) if threads == 1 or len(pieces) == 1 else _pool(os.getpid(), threads).map(work, pieces):
        pass


def _work(work: Callable[[Piece], None], inference: bool, piece: Piece) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        work(piece)


@functools.lru_cache(maxsize=1)
def _pool(process: int, number: int) -> ThreadPoolExecutor:
    """Threads in each of which torch uses one. `process`: threads do not survive a fork, so a child needs its own."""
    pool = ThreadPoolExecutor(number, thread_name_prefix="kernels")
    list(pool.map(_compute_alone, [threading.Barrier(number)] * number))
    torch.set_num_threads(number)  # the number is also the default of threads to come: put it back
    return pool


def _compute_alone(all_started: threading.Barrier) -> None:
    torch.get_num_threads()  # or the thread's first operation would take the process's number (torch 2.13)
    torch.set_num_threads(1)
    all_started.wait()
