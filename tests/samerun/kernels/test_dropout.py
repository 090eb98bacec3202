"""Dropout masks: golden bits, their distribution, and the functions of torch that use them."""

import copy
import ctypes

import numpy as np
import pytest
import torch
from numba.core.dispatcher import Dispatcher
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import samerun.kernels.dropout
from samerun.kernels import loops
from samerun.kernels.dropout import (
    LEVELS,
    DropoutMask,
    DropPath,
    dropout_by_row,
    recomputing,
    use_row_modules,
)

PLACES = tuple(range(16))


def kept_of(shape, call=0, places=PLACES, p=0.5):
    """The mask (shape) of call number `call`, as bool."""
    with dropout_by_row(None, places):
        return DropoutMask(call, places, round(p * LEVELS)).drop(torch.ones(shape)) != 0


# The bits


def test_the_bits_are_those_of_splitmix64_and_never_change():
    """Computed in Python's integers, from the formula in the paper."""

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    def kept(call, place, index, lane):
        key = mix((call + place * 0x9E3779B97F4A7C15) % 2**64)
        word = mix((key + index * 0x9E3779B97F4A7C15) % 2**64)
        level = (word >> 16 * lane) % 2**16
        return (level - 2**16 if level >= 2**15 else level) >= round(0.3 * LEVELS) - 2**15

    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the generator's first number from seed 0
    places, call = (5, 0, 2**33 + 1), 2**62 + 12345
    hidden = kept_of((3, 4, 9), call, places, 0.3)
    weights = kept_of((3, 2, 5, 6), call, places, 0.3)
    for row, place in enumerate(places):
        for token, feature in np.ndindex(4, 9):
            assert hidden[row, token, feature] == kept(call, place, token * 2**32 + feature // 4, feature % 4)
        for head, query, key in np.ndindex(2, 5, 6):
            index = head * 2**42 + query * 2**21 + key // 4
            assert weights[row, head, query, key] == kept(call, place, index, key % 4)
    bits = "".join("01"[bit] for bit in hidden[0].flatten().tolist())
    assert bits == "111101111100111111111111110011100110"


@pytest.mark.parametrize(
    "shape", [(16,), (16, 7), (16, 5, 12), (32, 3, 9), (16, 3, 6, 6), (16, 2, 3, 4, 5), (1, 6, 8), (15, 4)]
)
def test_torch_draws_the_same_bits(shape, monkeypatch):
    monkeypatch.setattr(samerun.kernels.dropout, "WORDS_AT_ONCE", 5)
    kept = torch.full(shape, 7, dtype=torch.uint8)
    DropoutMask(2**62 + 3, PLACES, LEVELS // 2).fill(kept)
    assert torch.equal(kept, kept_of(shape, 2**62 + 3))


def test_bits_depend_neither_on_threads_nor_on_pieces(monkeypatch, threads):
    expected = kept_of((16, 30, 33))  # one piece
    monkeypatch.setattr(samerun.kernels.dropout, "ELEMENTS_AT_ONCE", 200)
    assert torch.equal(kept_of((16, 30, 33)), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_is_scaled_and_rounded_once(dtype):
    x = (torch.randn(16, 50, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    mask = DropoutMask(0, PLACES, round(0.3 * LEVELS))
    expected = (x.to(torch.promote_types(dtype, torch.float32)) * mask.scale).to(dtype)
    assert torch.equal(mask.drop(x), expected * (mask.drop(torch.ones(16, 50)) != 0))
    assert torch.equal(mask.drop(x.T.contiguous().T), mask.drop(x))


def test_loops_compile_where_no_folder_for_them_can_be_written(monkeypatch):
    def refuse(self):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(Dispatcher, "enable_caching", refuse)
    assert loops.compiled(lambda x: x * 2)(3) == 6


def test_weights_of_attention_do_not_depend_on_addresses():
    """A loop that writes within 128 bytes (AVX2) behind the start of what it reads adds up in another order.
    Short rows of scores came to that, if the loop's own array filled a hole of the heap behind them."""
    heap, floats, far = ctypes.CDLL(None), ctypes.c_float * 7, np.empty(7, np.float32)
    heap.malloc.restype, heap.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    bias, lines = np.zeros((1, 7), np.float32), np.zeros((1, 1, 1), np.int64)
    constants = np.float32(1), np.ones((1, 1), np.uint64), np.uint64(1), np.int16(-(2**15)), np.float32(1)
    generator = np.random.default_rng(0)
    for size in range(96, 256, 16):
        for address, behind in [(heap.malloc(28), heap.malloc(size)) for _ in range(100)]:
            near, numbers = floats.from_address(address), generator.standard_normal(7, np.float32)
            heap.free(behind)
            for scores in (np.ctypeslib.as_array(near), far):
                scores[:] = numbers
                logarithms = np.empty((1, 1, 1), np.float32)
                loops.weigh(scores.reshape(1, 1, 1, 7), bias, lines, *constants, logarithms)
            assert list(near) == far.tolist()
            assert heap.malloc(size)  # so that the next call takes the next hole


# Rows


def test_a_rows_bits_depend_on_its_place_and_on_nothing_else():
    hidden, weights = kept_of((16, 9, 12)), kept_of((16, 2, 9, 9))
    some, wide = (11, 3), (16, 20, 12)
    assert torch.equal(kept_of((2, 9, 12), places=some), hidden[list(some)])
    assert torch.equal(kept_of(wide)[:, :9], hidden)
    assert torch.equal(kept_of((16, 2, 14, 22))[:, :, :9, :9], weights)
    windows = kept_of((48, 9, 12)).view(16, 3, 9, 12)  # three of each row
    assert torch.equal(windows[:, 0], hidden)  # as of rows with one window
    assert torch.equal(kept_of((32, 9, 12)).view(16, 2, 9, 12), windows[:, :2])
    assert 0.4 < float((windows[:, 0] == windows[:, 1]).float().mean()) < 0.6
    assert not torch.equal(windows[:, 0, :, 4:], windows[:, 1, :, :8])  # nor is one the other, shifted


def test_a_shared_tensor_has_one_mask_and_another_layout_one_of_each_micro_batch():
    assert torch.equal(kept_of((1, 9, 12)), kept_of((1, 9, 12), places=(8, 9, 4)))
    assert not torch.equal(kept_of((7, 12)), kept_of((7, 12), places=(8, 9, 4)))
    weight = nn.Parameter(torch.ones(4, 8))
    found = []
    for places in ((0,), (1,), (0, 1), (2, 3)):
        torch.manual_seed(0)
        with dropout_by_row(None, places):
            found.append(functional.dropout(weight, 0.5))
    assert all(torch.equal(mask, found[0]) for mask in found)


# torch's functions


@pytest.fixture
def by_row():
    torch.manual_seed(0)
    with dropout_by_row(None, tuple(range(9))):
        yield


def test_outside_of_the_context_and_without_places_dropout_is_torchs():
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "scaled_dot_product_attention")
    before = [getattr(functional, name) for name in names]
    with dropout_by_row(None, (0,)):
        assert all(getattr(functional, n) is not f for n, f in zip(names, before, strict=True))
    with pytest.raises(ZeroDivisionError), dropout_by_row(None, (0,)):
        1 / 0  # noqa: B018
    with dropout_by_row((3,), None):
        assert [getattr(functional, name) for name in names] == before
    assert [getattr(functional, name) for name in names] == before


def test_torchs_function_computes_what_drops_all_or_nothing_or_in_place(by_row):
    x, module = torch.ones(9, 8), nn.Dropout(0.5)
    assert torch.equal(module.eval()(x), x)
    assert not torch.equal(module.train()(x), x)
    for p, expected in ((0.0, x), (1.0, torch.zeros(9, 8))):
        module.p = p
        assert torch.equal(module(x), expected)
    assert functional.dropout(x, 0.5, inplace=True) is x
    assert set(x.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_pass_where_values_do_in_any_layout(dtype, turned, by_row):
    x = torch.randn(11, 9, dtype=dtype).T if turned else torch.randn(9, 11, dtype=dtype)
    y = functional.dropout(x.requires_grad_(), 0.3)
    assert y.dtype == dtype
    weights = torch.randn(11, 9, dtype=dtype).T
    y.backward(weights)
    kept, scale = y != 0, LEVELS / (LEVELS - round(0.3 * LEVELS))
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(x.grad, torch.where(kept, weights * scale, 0.0))
    torch.testing.assert_close(y.detach(), torch.where(kept, x.detach() * scale, 0.0))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_channels_are_dropped_as_a_whole(dimensions, by_row):
    module = getattr(nn, f"Dropout{dimensions}d")(0.5)
    x = torch.ones(9, 20, *[3] * dimensions)
    found = module(x)
    channels = found.flatten(2).unique(dim=2)
    assert channels.shape == (9, 20, 1)
    assert set(channels.unique().tolist()) == {0.0, 2.0}
    assert len(channels.unique(dim=0)) == 9


class SomeDropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob


def test_stochastic_depth_drops_rows_as_a_whole(by_row):
    model = nn.ModuleList([SomeDropPath(0.5), SomeDropPath(0.0), SomeDropPath(None), nn.Dropout(0.5)])
    use_row_modules(model)
    assert [isinstance(module, DropPath) for module in model] == [True, True, True, False]
    x = torch.ones(9, 4, 5)
    assert set(model[0](x).flatten(1).unique(dim=1).flatten().tolist()) == {0.0, 2.0}
    for module in (model[1], model[2], copy.deepcopy(model[0]).eval()):
        assert torch.equal(module(x), x)


def test_what_is_computed_again_has_the_same_mask_after_the_context_too():
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        x = torch.ones(40, 40, requires_grad=True)
        with dropout_by_row(None, (6, 2)):
            given = {"use_reentrant": False, "context_fn": recomputing}
            y = checkpoint(functional.dropout, x, 0.5, **given) if again else functional.dropout(x, 0.5)
        torch.rand(3)  # the generator goes on
        (y * y).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_tiny_tensors(by_row):
    for shape in ((0,), (9, 0), (9,), (1,), (9, 1), ()):
        assert functional.dropout(torch.ones(shape), 0.5).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_storage_of_a_weight_can_still_be_freed(dtype, by_row):
    """DeBERTa drops out its position embeddings themselves, whose storage FSDP frees after the step."""
    weight = torch.nn.Parameter(torch.ones(16, 32, dtype=dtype))
    functional.dropout(weight, 0.5).sum().backward()
    weight.untyped_storage().resize_(0)
