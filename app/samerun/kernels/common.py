"""What the kernels share: the current batch's rows, copies to a GPU, Python in torch's threads with numpy's
OpenBLAS in them.

Rows: BigBird's attention and windows need the number of tokens. Reading it from a GPU would make the host
wait for all queued work. The collator has counted them already, so the engine sets the lengths while it calls
a task, and modules read them in their forward pass. In training it also sets each row's place in the global
batch, of which dropout by row is a function. Both are set again where the backward pass recomputes layers
(`dropout.recomputing`).

Threads: if torch parallelised every operation, its threads would wait for each other after hundreds of small
operations. That costs little on a quiet machine, but a factor of ten when other processes compute too.
BigBird's attention at 2048 tokens, forward and backward on two threads of its own, took 146 ms so, 188 ms by
torch's parallelism and 231 ms on one thread (benchmarks/bench_cpu.md, remarks on "Attention").
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.overrides import has_torch_function_unary

from samerun.kernels import is_zen5

AVX512 = ("SkylakeX", "Cooperlake", "Sapphirerapids")  # names of OpenBLAS's kernels

Piece = TypeVar("Piece")


class BatchRows(NamedTuple):
    """The rows of a micro-batch. `lengths`: tokens of each, None if they are unknown; `places`: of each in
    the global batch, None outside of training and with torch's dropout."""

    lengths: tuple[int, ...] | None = None
    places: tuple[int, ...] | None = None


UNKNOWN = BatchRows()
_ROWS: ContextVar[BatchRows] = ContextVar("rows", default=UNKNOWN)


@contextlib.contextmanager
def row_lengths(lengths: tuple[int, ...] | None, places: tuple[int, ...] | None = None) -> Iterator[None]:
    """Sets the rows (`Batch.lengths` and `Batch.places`) for the forward passes inside the `with` block."""
    token = _ROWS.set(BatchRows(lengths, places))
    try:
        yield
    finally:
        _ROWS.reset(token)


def current_rows() -> BatchRows:
    return _ROWS.get()


def current_row_lengths(rows: int, width: int) -> tuple[int, ...] | None:
    """The lengths of a batch of so many rows, padded to `width`; None if unknown or of another shape."""
    lengths = _ROWS.get().lengths
    fits = lengths is not None and len(lengths) == rows and max(lengths, default=0) <= width
    return lengths if fits else None


def on_cpu(x: Tensor) -> bool:
    """Whether a CPU computes with `x`. A dry run for a GPU, which is a torch function mode, only seems to."""
    return x.device.type == "cpu" and not has_torch_function_unary(x)


def memory_of(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor on the CPU as an array. After `Tensor.numpy` a storage could not be resized any
    more, which FSDP does with the storages of gathered weights."""
    return np.from_dlpack(tensor.detach())


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to `device` without waiting. A plain `.to("cuda")` waits until the GPU has
    finished all queued work; a copy from pinned memory is queued. Raises `RuntimeError` while a CUDA graph is
    recorded: a replay would read the pinned memory when it may hold something else."""
    if device.type != "cuda":
        return tensor.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the pass copies values from the host")
    return tensor.pin_memory().to(device, non_blocking=True)


def constants(values: np.ndarray | Sequence[float], like: Tensor) -> Tensor:
    """(n,) `values` of a loss in the type of `like` and on its device. They are sent to a GPU once, so that
    recorded passes can read them there."""
    values = np.asarray(values, dtype=np.float64)
    if like.device.type != "cuda":
        return torch.as_tensor(values, dtype=like.dtype, device=like.device)
    return _on_gpu(values.tobytes(), like.dtype, like.device)


@functools.cache  # never emptied: graphs read the tensors
def _on_gpu(values: bytes, dtype: torch.dtype, device: torch.device) -> Tensor:
    return send(torch.frombuffer(bytearray(values), dtype=torch.float64).to(dtype), device)


def slices(number: int, size: int) -> list[slice]:
    """The numbers below `number` in slices of this size; the last one may be smaller."""
    return [slice(start, min(start + size, number)) for start in range(0, number, size)]


# Threads


def in_threads(work: Callable[[Piece], None], pieces: Iterable[Piece]) -> None:
    """Calls `work(piece)` for each piece without gradients, in as many threads as torch has: those of torch's
    own operations, which would compete with others. A single piece runs in the calling thread, with torch's
    own parallelism. In a forked process torch must have one thread, as for torch's operations.

    Raises: the first error of a piece.
    """
    pieces, threads = list(pieces), torch.get_num_threads()
    openmp = _openmp() if threads > 1 and len(pieces) > 1 else None
    inference, left, errors = torch.is_inference_mode_enabled(), iter(pieces), []

    def work_alone(_: Any) -> None:
        try:
            torch.get_num_threads()  # otherwise the thread's first operation resets the number (torch 2.13)
            openmp.omp_set_num_threads(1)  # until the thread leaves this function
            _work(work, left, inference)
        except BaseException as error:  # it cannot pass OpenMP
            errors.append(error)

    if openmp is None:
        _work(work, left, inference)
        return
    with in_one_thread():
        # With fewer threads OpenMP would end the others, and start new ones for the next operation.
        openmp.GOMP_parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work_alone), None, threads, 0)
    if errors:
        raise errors[0]


def _work(work: Callable[[Piece], None], pieces: Iterator[Piece], inference: bool) -> None:
    # The threads of OpenMP do not have torch's modes of the calling one.
    with torch.inference_mode(inference), torch.no_grad():
        for piece in pieces:
            work(piece)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP of torch, if it has the entry of GCC's, which LLVM's has too."""
    found = ThreadpoolController().select(user_api="openmp").lib_controllers
    found.sort(key=lambda library: os.path.dirname(torch.__file__) not in library.filepath)
    return found[0].dynlib if found and hasattr(found[0].dynlib, "GOMP_parallel") else None


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
    if not is_zen5():
        return None
    for library in ThreadpoolController().lib_controllers:
        if "numpy" in library.filepath and library.info().get("architecture") in AVX512:
            return library
    return None
