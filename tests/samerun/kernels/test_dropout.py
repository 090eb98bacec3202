"""Dropout: the share it should be, scaled to the same expectation, drawn again from the same seed."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import samerun.kernels.dropout
from samerun.kernels.dropout import LEVELS, Dropout, dropout


def scale_of(p):
    return LEVELS / (LEVELS - round(p * LEVELS))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_a_share_is_dropped_and_the_rest_scaled(p):
    torch.manual_seed(0)
    x = torch.ones(1000, 1003)
    y = dropout(x, p)
    dropped = (y == 0).float()
    deviation = (p * (1 - p) / x.numel()) ** 0.5
    assert dropped.mean().item() == pytest.approx(p, abs=5 * deviation + 0.5 / LEVELS)
    assert y.max().item() == pytest.approx(scale_of(p)) == pytest.approx(1 / (1 - p), rel=1e-4)
    assert set(y.unique().tolist()) == {0.0, y.max().item()}
    # Four elements come of one number drawn: each alike, and independent of its neighbours.
    lanes = dropped.flatten()[: x.numel() // 4 * 4].view(-1, 4)
    assert torch.allclose(lanes.mean(dim=0), torch.tensor(p), atol=10 * deviation + 0.5 / LEVELS)
    for i in range(3):
        assert (lanes[:, i] * lanes[:, i + 1]).mean().item() == pytest.approx(p * p, abs=12 * deviation)


def test_the_seed_decides():
    x = torch.ones(50, 7)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append((dropout(x, 0.5), dropout(x, 0.5)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])
    assert not torch.equal(found[0][0], found[2][0])


def test_the_mask_depends_on_the_seed_and_not_on_threads(monkeypatch):
    monkeypatch.setattr(samerun.kernels.dropout, "PIECE", 1000)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            x = torch.ones(70, 99, requires_grad=True)
            y = dropout(x, 0.5)
            y.sum().backward()
            assert torch.equal(x.grad, y)
            found.append(y)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    dropped = (found[0] == 0).flatten()
    assert not torch.equal(dropped[:1000], dropped[1000:2000])  # each piece has its own


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_come_in_any_layout(turned):
    torch.manual_seed(0)
    x = torch.ones(6, 7).T.requires_grad_() if turned else torch.ones(7, 6, requires_grad=True)
    y = dropout(x, 0.5)
    y.backward(torch.ones(6, 7).T)
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_pass_where_values_do(dtype):
    torch.manual_seed(0)
    x = torch.randn(9, 11, dtype=dtype, requires_grad=True)
    y = dropout(x, 0.3)
    assert y.dtype == dtype
    weights = torch.randn(9, 11, dtype=dtype)
    y.backward(weights)
    kept = y != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(x.grad, torch.where(kept, weights * scale_of(0.3), 0.0))
    torch.testing.assert_close(y.detach(), torch.where(kept, x.detach() * scale_of(0.3), 0.0))


def test_what_is_computed_again_has_the_same_mask():
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        x = torch.ones(40, 40, requires_grad=True)
        y = checkpoint(dropout, x, 0.5, use_reentrant=False) if again else dropout(x, 0.5)
        torch.rand(3)  # the generator goes on
        (y * y).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_the_module_is_torchs_elsewhere(monkeypatch):
    module, x = Dropout(0.5), torch.ones(8, 8)
    assert torch.equal(module.eval()(x), x)
    module.train()
    assert not torch.equal(module(x), x)
    for p, expected in ((0.0, x), (1.0, torch.zeros(8, 8))):
        module.p = p
        assert torch.equal(module(x), expected)
    module.p = 0.5
    torch.manual_seed(0)
    expected = torch.nn.functional.dropout(x, 0.5)
    torch.manual_seed(0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(module(x), expected)


def test_tiny_tensors():
    for size in (0, 1, 3, 5):
        assert dropout(torch.ones(size), 0.5).shape == (size,)
