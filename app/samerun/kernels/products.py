"""Matrix products on CPUs where torch's are slow: in fp32 by numpy's OpenBLAS instead of MKL, in bf16 by
fp32 products.

fp32. Replaces: `torch.mm`, `torch.addmm` with a bias, `torch.bmm` and `torch.baddbmm_`, which linear layers
and attention call in both passes, for every model. Active: in fp32 on AMD's Zen 5 (family 26), if OpenBLAS
computes with AVX-512, which it finds out itself; OPENBLAS_CORETYPE=HASWELL in the environment forbids it.
MKL (2024.2, in torch 2.13) computes with AVX2 on AMD's CPUs and takes twice the time. On Zen 4 a step gains
1.05 to 1.09; older ones were not measured. On Intel's, MKL computes with AVX-512, too. Results differ in
rounding only. Gain: a training step is 1.4 to 1.8 times as fast (benchmarks/notes.md, "Matrix products on a
CPU"). oneDNN, which torch has for fp16 and bf16, is about as fast, but keeps a compiled product of 0.3 to
0.6 MB for each shape, and texts have many shapes.

bf16. Replaces: `torch.mm`, `torch.addmm`, `torch.bmm` and convolutions of bf16 tensors. Active: in bf16 on
CPUs for which oneDNN has no bf16 products, those without AVX-512, as in many laptops. The inputs are
converted to fp32, which is exact, and the result is rounded to bf16 once, as by a CPU with instructions for
it. Gain: a training step of MiniLM is 11 times as fast (benchmarks/notes.md, "bf16 on a CPU without
instructions for it").
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samerun.kernels.common import in_one_thread, in_threads, memory_of, openblas, slices

# Multiplications that outweigh a call through Python, and a switch of threads.
ENOUGH, ENOUGH_FOR_THREADS = 2**18, 2**25


def use_openblas() -> None:
    """Gives OpenBLAS torch's number of threads and torch's products, if it computes with AVX-512."""
    if blas := openblas():
        blas.set_num_threads(torch.get_num_threads())
        replace_products(_PRODUCTS)


def use_fp32_for_bf16() -> None:
    """Computes bf16 products in fp32 where torch has no fast ones."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        replace_products(_OF_BF16)


@functools.cache
def replace_products(products: tuple[tuple[str, Callable], ...]) -> torch.library.Library:
    """Registers products of these names in torch, for tensors on a CPU."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name, product in products:
            library.impl(name, product, "CPU")
    return library


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if not _is_enough(a, b):
        return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[-1]))
    return _product(a, b)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.ndim != 1 or not (beta == alpha == 1) or not _is_enough(a, b):
        out = a.new_empty(a.shape[0], b.shape[-1])
        return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=out)
    return _product(a, b).add_(bias)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    if not _is_enough(a, b):
        return torch.bmm(a, b, out=a.new_empty(*a.shape[:2], b.shape[-1]))
    out = a.new_empty(*a.shape[:2], b.shape[-1])
    _fill(out, a, b)
    return out


def _baddbmm_(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    fits = total.dtype is torch.float32 and total.shape == (*a.shape[:2], b.shape[-1])
    if alpha != 1 or not fits or not _is_enough(a, b):
        return torch.baddbmm(total, a, b, beta=beta, alpha=alpha, out=total)
    if beta == 0:
        _fill(total, a, b)
        return total
    if beta != 1:
        total.mul_(beta)
    return total.add_(_bmm(a, b))


_PRODUCTS = ("mm", _mm), ("addmm", _addmm), ("bmm", _bmm), ("baddbmm_", _baddbmm_)


def _is_enough(a: Tensor, b: Tensor) -> bool:
    """False also for what torch refuses, whose message is then torch's own."""
    return (
        a.dtype is b.dtype is torch.float32
        and a.ndim == b.ndim
        and a.shape[-1] == b.shape[-2]
        and a.shape[:-2] == b.shape[:-2]
        and a.numel() * b.shape[-1] >= ENOUGH
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[-1])
    np.matmul(memory_of(a), memory_of(b), out=memory_of(out))
    return out


def _in_fp32(product: Callable) -> Callable:
    """`product` of bf16 tensors in fp32. The form with `out` is torch's own, which is not replaced."""

    def multiply(*tensors: Tensor, **factors: float) -> Tensor:
        a, b = tensors[-2:]
        wide = tuple(map(_widened, tensors))
        out = wide[-1].new_empty(*a.shape[:-1], b.shape[-1])
        return product(*wide, **factors, out=out).to(a.dtype)

    return multiply


def _convolution_in_fp32(operator: torch._ops.OpOverload) -> Callable:
    """A convolution of bf16 tensors, or its gradients, in fp32. `operator` has one kernel for all devices, a
    foreign one (PrivateUse1) too: only that of CPUs is replaced."""
    of_all_devices = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def convolve(*arguments: Any) -> Any:
        wide = (_widened(each) if isinstance(each, Tensor) else each for each in arguments)
        made = operator.redispatch(of_all_devices, *wide)
        if arguments[0].dtype is not torch.bfloat16:
            return made
        if isinstance(made, Tensor):
            return made.bfloat16()
        return tuple(None if gradient is None else gradient.bfloat16() for gradient in made)

    return convolve


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


_OF_BF16 = (
    *((name, _in_fp32(getattr(torch, name))) for name in ("mm", "addmm", "bmm")),
    ("convolution", _convolution_in_fp32(torch.ops.aten.convolution.default)),
    ("convolution_backward", _convolution_in_fp32(torch.ops.aten.convolution_backward.default)),
)


def bmm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`torch.bmm(a, b, out=out)`. `out` may be a part of the columns of a larger tensor."""
    if openblas() is None or out.dtype is not torch.float32 or not _is_enough(a, b):
        torch.bmm(a, b, out=out)
    else:
        _fill(out, a, b)


def _fill(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Fills `out` with products of matrices (n, i, j) and (n, j, k), some in each thread: OpenBLAS alone
    would give each small product to all threads."""
    arrays = memory_of(out), memory_of(a), memory_of(b)
    threads, count = torch.get_num_threads(), len(out)
    few = a.numel() * b.shape[-1] < ENOUGH_FOR_THREADS
    share = count if few or count < threads else -(-count // threads)

    def multiply(part: slice) -> None:
        into, left, right = (array[part] for array in arrays)
        np.matmul(left, right, out=into)

    with in_one_thread() if few else contextlib.nullcontext():
        in_threads(multiply, slices(count, share))
