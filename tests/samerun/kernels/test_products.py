"""Products on a CPU by numpy's OpenBLAS, and of bf16 in fp32: torch's results, and where they are used."""

import contextlib
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from samerun.kernels import common as kernel_threads
from samerun.kernels import products
from samerun.kernels.common import in_threads, openblas


@pytest.fixture
def calls(threads, monkeypatch):
    """Sizes of the products that OpenBLAS computes while it replaces torch's, with one thread and three."""
    sizes = []

    def matmul(a, b, out):
        sizes.append(out.size)
        return np.matmul(a, b, out=out)

    monkeypatch.setattr(products, "np", SimpleNamespace(matmul=matmul))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library = products.replace_products(products._PRODUCTS)
    yield sizes
    library._destroy()
    products.replace_products.cache_clear()


@contextlib.contextmanager
def in_fp32(monkeypatch):
    seen, widened = [], products._widened
    monkeypatch.setattr(products, "_widened", lambda tensor: seen.append(tensor.dtype) or widened(tensor))
    products.replace_products.cache_clear()
    monkeypatch.setattr(products.torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    products.use_fp32_for_bf16()
    library = products.replace_products(products._OF_BF16)
    try:
        yield seen
    finally:
        library._destroy()
        products.replace_products.cache_clear()


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


A, B, BATCH, OTHER = (64, 96), (96, 80), (6, 64, 48), (6, 48, 40)
PRODUCTS = {
    "mm": (lambda a, b: a @ b, A, B, True),
    "transposed": (lambda a, b: (b.T @ a.T).T, A, B, True),
    "columns": (lambda a, b: a[:, ::2] @ b[::2], (64, 192), (192, 80), True),
    "linear": (lambda a, b: functional.linear(a.view(4, 16, 96), b.T, b[0]), A, B, True),
    "bmm": (torch.bmm, BATCH, OTHER, True),
    "bmm transposed": (lambda a, b: a @ b.mT, BATCH, (6, 40, 48), True),
    "baddbmm": (lambda a, b: torch.ones(6, 64, 40).baddbmm_(a, b), BATCH, OTHER, True),
    "baddbmm over": (lambda a, b: torch.ones(6, 64, 40).baddbmm_(a, b, beta=0), BATCH, OTHER, True),
    "baddbmm half": (lambda a, b: torch.ones(6, 64, 40).baddbmm_(a, b, beta=0.5), BATCH, OTHER, True),
    # torch's own
    "small": (lambda a, b: a @ b, (8, 96), B, False),
    "empty": (lambda a, b: a[:0] @ b, A, B, False),
    "double": (lambda a, b: a.double() @ b.double(), A, B, False),
    "half": (lambda a, b: (a.bfloat16() @ b.bfloat16()).float(), A, B, False),
    "matrix": (lambda a, b: torch.addmm(torch.ones(64, 80), a, b), A, B, False),
    "scaled": (lambda a, b: torch.addmm(torch.ones(80), a, b, beta=2, alpha=3), A, B, False),
    "baddbmm scaled": (lambda a, b: torch.ones(6, 64, 40).baddbmm_(a, b, alpha=2), BATCH, OTHER, False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_their_gradients_are_torchs(name, calls, monkeypatch):
    work, *shapes, replaced = PRODUCTS[name]
    results = []
    for dtype in (torch.float32, torch.float64):
        monkeypatch.setattr(torch, "ones", partial(torch.ones, dtype=dtype))
        a, b = (drawn(*shape).to(dtype).requires_grad_() for shape in shapes)
        calls.clear()
        made = work(a, b)
        assert bool(calls) == (replaced and dtype is torch.float32)
        made.square().sum().backward()
        results.append((made.detach(), a.grad, b.grad))
        for tensor in (a, b):
            tensor.untyped_storage().resize_(0)  # as FSDP frees gathered weights
    allowed = 0.05 if name == "half" else 1e-6
    for ours, exact in zip(*results, strict=True):
        assert torch.linalg.norm(ours.double() - exact) <= allowed * (1 + torch.linalg.norm(exact))


OF_BF16 = {
    "linear": (lambda a, b: functional.linear(a.view(4, 16, 96), b.T, b[0]), A, B),
    "addmm": (lambda a, b: torch.addmm(a[:, :80], a, b, beta=2, alpha=3), A, B),
    "bmm": (torch.bmm, BATCH, OTHER),
    "convolution": (partial(functional.conv2d, padding=1, stride=2), (2, 4, 9, 9), (8, 4, 3, 3)),
    "transposed": (partial(functional.conv_transpose2d, stride=2), (2, 4, 9, 9), (4, 8, 2, 2)),
}


@pytest.mark.parametrize("name", OF_BF16)
def test_a_product_of_bf16_is_one_in_fp32_rounded_once(name, monkeypatch):
    work, *shapes = OF_BF16[name]
    halves = [drawn(*shape).bfloat16().requires_grad_() for shape in shapes]
    singles = [half.detach().float().requires_grad_() for half in halves]
    single = work(*singles)
    with in_fp32(monkeypatch) as seen:
        half = work(*halves)
        half.float().square().sum().backward()
    assert seen.count(torch.bfloat16) >= 4
    assert torch.equal(half, single.bfloat16())
    (2 * half.detach().float() * single).sum().backward()  # the same gradient of the result
    for ours, exact in zip(halves, singles, strict=True):
        assert (ours.grad - exact.grad).abs().max() <= 0.01 * exact.grad.abs().max()


@pytest.mark.parametrize(
    ("shape", "shared"), [((6, 64, 48), False), ((6, 640, 480), True), ((1, 640, 4800), False)]
)
def test_several_threads_share_a_large_batch(calls, shape, shared):
    torch.bmm(drawn(*shape), drawn(shape[0], shape[2], 40))
    parts = torch.get_num_threads() if shared else 1
    assert sorted(calls) == [shape[0] * shape[1] * 40 // parts] * parts


def test_what_torch_refuses_has_torchs_message(calls):
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(64x96 and 80x96\)"):
        drawn(*A) @ drawn(80, 96)
    with pytest.raises(RuntimeError, match="first two dimensions of batch2"):
        torch.bmm(drawn(*BATCH), drawn(5, 48, 40))
    with pytest.raises(RuntimeError, match="dtypes must be the same"):
        torch.ones(6, 64, 40, dtype=torch.float64).baddbmm_(drawn(*BATCH), drawn(*OTHER))


def test_in_inference_mode(calls):
    with torch.inference_mode():
        made = functional.linear(drawn(*A), drawn(*B).T)
    assert torch.allclose(made, (drawn(*A).double() @ drawn(*B).double()).float(), atol=1e-4)
    assert calls


@pytest.mark.parametrize("found", [True, False])
def test_a_part_of_a_tensor_is_filled(calls, monkeypatch, found):
    monkeypatch.setattr(products, "openblas", lambda: found or None)
    whole = torch.zeros(6, 64, 100)
    products.bmm_into(whole[:, :, 20:60], drawn(*BATCH), drawn(*OTHER))
    assert bool(calls) == found
    assert torch.allclose(whole[:, :, 20:60], drawn(*BATCH) @ drawn(*OTHER), atol=1e-4)
    assert not whole[:, :, :20].any()
    assert not whole[:, :, 60:].any()


@pytest.mark.parametrize(
    ("zen5", "library", "kernels", "found"),
    [
        (True, "numpy.libs/libscipy_openblas64_.so", "SkylakeX", True),
        (True, "numpy.libs/libscipy_openblas64_.so", "Haswell", False),  # OPENBLAS_CORETYPE
        (True, "scipy.libs/libscipy_openblas.so", "SkylakeX", False),
        (False, "numpy.libs/libscipy_openblas64_.so", "SkylakeX", False),  # not measured
    ],
)
@pytest.mark.parametrize("threads", [3], indirect=True)
def test_only_the_cpus_on_which_it_was_measured_use_it(monkeypatch, threads, zen5, library, kernels, found):
    in_threads(lambda piece: None, range(2))  # it looks for OpenMP's library once
    numbers = []
    loaded = SimpleNamespace(
        filepath=library, info=lambda: {"architecture": kernels}, set_num_threads=numbers.append
    )
    controller = SimpleNamespace(lib_controllers=[loaded])
    monkeypatch.setattr(kernel_threads, "ThreadpoolController", lambda: controller)
    monkeypatch.setattr(kernel_threads, "is_zen5", lambda: zen5)
    monkeypatch.setattr(products, "replace_products", lambda _: numbers.append("replaced"))
    openblas.cache_clear()
    try:
        products.use_openblas()
        in_threads(lambda piece: numbers.append("work"), range(1))
        in_threads(lambda piece: numbers.append("works"), range(2))
        products.bmm_into(torch.empty(6, 64, 40), drawn(*BATCH), drawn(*OTHER))
    finally:
        openblas.cache_clear()
    every = [threads, "replaced", "work", 1, "works", "works", threads, 1, threads]
    assert numbers == (every if found else ["work", "works", "works"])


def test_a_cpu_with_fast_bf16_keeps_torchs_products(monkeypatch):
    monkeypatch.setattr(products.torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(products, "replace_products", lambda _: pytest.fail("replaced"))
    products.use_fp32_for_bf16()
