"""A kernel that fails here, or computes something else, is not relied on."""

import warnings
from dataclasses import replace

import pytest
import torch

from samerun.kernels.padding_free.attention import by_length, is_usable, jagged

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgetful():
    is_usable.cache_clear()
    yield
    is_usable.cache_clear()


@pytest.mark.parametrize("with_dropout", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_works_is_taken_and_leaves_the_runs_generator_alone(dtype, with_dropout):
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype")
        assert is_usable(jagged, CPU, dtype, 8, with_dropout)
    assert torch.equal(torch.get_rng_state(), before)


def raises(*_):
    raise RuntimeError("no kernel for this chip")


def forgets_rows(query, key, value, rows, dropout, scale):
    return by_length(query, key, value, replace(rows, lengths=(len(query),)), dropout, scale)


def gives_nan(query, key, value, rows, dropout, scale):
    return by_length(query, key, value, rows, 0.0, scale) * (float("nan") if dropout else 1.0)


@pytest.mark.parametrize(
    ("kernel", "with_dropout", "reason"),
    [
        (raises, False, "RuntimeError: no kernel for this chip"),
        (forgets_rows, False, "it differs by"),
        (gives_nan, True, "its results with dropout are not finite"),
    ],
)
def test_one_that_does_not_is_left_with_a_warning(kernel, with_dropout, reason):
    with pytest.warns(UserWarning, match=reason):
        assert not is_usable(kernel, CPU, torch.float32, 8, with_dropout)
