"""Threads of one core each, and numpy's OpenBLAS in them.

If torch parallelised every operation, its threads would wait for each other after hundreds of small
operations. That costs little on a quiet machine, but a factor of ten when other processes compute too.
BigBird's attention at 2048 tokens, forward and backward on two threads, takes 146 ms so, 188 ms by torch's
parallelism and 231 ms on one thread (benchmarks/bench_cpu.md, remarks on "Attention").
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from threadpoolctl import ThreadpoolController

ZEN5 = "26"  # the family in /proc/cpuinfo
AVX512 = ("SkylakeX", "Cooperlake", "Sapphirerapids")  # names of OpenBLAS's kernels

Piece = TypeVar("Piece")


def in_threads(work: Callable[[Piece], None], pieces: Iterable[Piece]) -> None:
    """Calls `work(piece)` for each piece without gradients, in as many threads as torch has. A single piece
    runs in the calling thread, with torch's own parallelism."""
    threads = torch.get_num_threads()
    pieces = list(pieces)
    # New threads do not inherit torch's modes.
    work = functools.partial(_work, work, torch.is_inference_mode_enabled())
    if threads == 1 or len(pieces) == 1:
        for piece in pieces:
            work(piece)
    else:
        with in_one_thread():
            for _ in _pool(os.getpid(), threads).map(work, pieces):
                pass


def _work(work: Callable[[Piece], None], inference: bool, piece: Piece) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        work(piece)


@functools.lru_cache(maxsize=1)
def _pool(process: int, number: int) -> ThreadPoolExecutor:
    """Threads in which torch is single-threaded. `process`: cache key; threads do not survive a fork."""
    pool = ThreadPoolExecutor(number, thread_name_prefix="kernels")
    list(pool.map(_set_single_threaded, [threading.Barrier(number)] * number))
    torch.set_num_threads(number)  # the threads changed the default for later threads
    return pool


def _set_single_threaded(all_started: threading.Barrier) -> None:
    torch.get_num_threads()  # otherwise the thread's first operation resets the number (torch 2.13)
    torch.set_num_threads(1)
    all_started.wait()


@contextlib.contextmanager
def in_one_thread() -> Iterator[None]:
    """Products inside the `with` block use one thread each, because several threads compute them."""
    blas = openblas()
    if blas is not None:
        blas.set_num_threads(1)
    try:
        yield
    finally:
        if blas is not None:
            blas.set_num_threads(torch.get_num_threads())


@functools.cache
def openblas() -> Any | None:
    """The library in numpy, for `threadpoolctl`; None where it is not known to be faster."""
    if _family() != ("AuthenticAMD", ZEN5):
        return None
    for library in ThreadpoolController().lib_controllers:
        if "numpy" in library.filepath and library.info().get("architecture") in AVX512:
            return library
    return None


def _family() -> tuple[str, str]:
    """Vendor and family of the first CPU; empty where the system does not say."""
    facts = dict.fromkeys(("vendor_id", "cpu family"), "")
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in itertools.takewhile(str.strip, file):
            name, _, value = line.partition(":")
            facts[name.strip()] = value.strip()
    return facts["vendor_id"], facts["cpu family"]
