"""Attention with dropout: torch's scaled_dot_product_attention but for the sample of the mask."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import samerun.kernels.dropout
from samerun.kernels.dropout import DropoutAttention, DropoutMask, attention, dropout_by_row

LEVEL = round(0.1 * 2**16)


def attend(query, key, value, mask, p, scale=None):
    with dropout_by_row(None, tuple(range(len(query)))):
        return attention(query, key, value, mask, p, scale=scale)


@pytest.fixture
def calls(monkeypatch):
    """The dropped levels of each call of our attention, which drops nothing here, so that one can compare."""
    asked = []
    monkeypatch.setattr(DropoutMask, "threshold", -(2**15))
    monkeypatch.setattr(DropoutMask, "scale", 1.0)
    apply = DropoutAttention.apply
    monkeypatch.setattr(DropoutAttention, "apply", lambda *x: asked.append(x[4].dropped_levels) or apply(*x))
    return asked


def tensors(*shape, keys=None):
    """Query, key and value of that shape, the two of so many `keys` if they are not as many."""
    generator = torch.Generator().manual_seed(0)
    other = shape if keys is None else (*shape[:2], keys, shape[3])
    return [torch.randn(*x, generator=generator, requires_grad=True) for x in (shape, other, other)]


REAL = (torch.arange(7) < torch.tensor([[7], [4]]))[:, None, None]
MASKS = {
    "none": None,
    "keys": REAL,
    "pairs": REAL.expand(2, 1, 7, 7),
    "added": torch.randn(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)),
    "of two dimensions": torch.ones(7, 7, dtype=torch.bool).tril(),
    "of heads": torch.randn(1, 3, 7, 7, generator=torch.Generator().manual_seed(1)),
    "nothing seen": torch.zeros(2, 1, 7, 7).index_fill_(0, torch.tensor([1]), -torch.inf),
    "nothing seen, of booleans": torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 7),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_without_the_dropping_it_is_torchs(mask, scale, calls):
    ours, theirs = tensors(2, 3, 7, 8), tensors(2, 3, 7, 8)
    found = attend(*ours, MASKS[mask], 0.1, scale)
    expected = scaled_dot_product_attention(*theirs, attn_mask=MASKS[mask], scale=scale)
    check_alike(ours, found, theirs, expected, found.detach())
    assert calls == [LEVEL]


def check_alike(ours, found, theirs, expected, direction, **near):
    torch.testing.assert_close(found, expected.to(found.dtype), **near)
    found.backward(direction)
    expected.backward(direction.to(expected.dtype))
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad.dtype == a.dtype
        torch.testing.assert_close(a.grad.to(b.dtype), b.grad, **near)


def kept_of(query, key, mask=None, p=0.3):
    """What seed 0 keeps of (rows, heads, queries, keys): the sums over a value that is 1 for one key."""
    torch.manual_seed(0)
    ones = torch.eye(key.shape[2]).expand(*key.shape[:2], -1, -1)
    return attend(query.detach(), key.detach(), ones, mask, p) != 0


def explicit(query, key, value, mask, kept, p=0.3):
    """(rows, heads, tokens, size) as in the textbook."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(dim=-1) * kept / (1 - p)) @ value


@pytest.mark.parametrize("keys", [7, 50])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("weights", [1, 20, 120, 700, 2**17])
def test_however_the_work_is_cut_it_is_attention_with_some_weights_dropped(
    weights, padded, keys, monkeypatch
):
    lengths = torch.tensor([keys, 4, keys - 1])[:, None, None, None]
    mask = torch.arange(keys) < lengths if padded else None
    kept = kept_of(*tensors(3, 4, 9, 8, keys=keys)[:2], mask)
    # Single queries, some queries of a head, whole heads, whole rows, everything at once.
    monkeypatch.setattr(samerun.kernels.dropout, "WEIGHTS_AT_ONCE", weights)
    share = kept.float().mean() / (1.0 if mask is None else mask.float().mean())
    assert share == pytest.approx(0.7, abs=0.1)
    ours, theirs = tensors(3, 4, 9, 8, keys=keys), tensors(3, 4, 9, 8, keys=keys)
    torch.manual_seed(0)
    found, expected = attend(*ours, mask, 0.3), explicit(*theirs, mask, kept)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    near = {"atol": 1e-4, "rtol": 1e-4}  # 0.3 is a multiple of 2**-16 here
    check_alike(ours, found, theirs, expected, direction, **near)


@pytest.mark.parametrize(("dtype", "fast", "near"), [
    (torch.bfloat16, False, 0), (torch.bfloat16, True, 0.01), (torch.float16, True, 0),
])  # fmt: skip
def test_half_precision_is_computed_in_single_but_for_fast_products(dtype, fast, near, calls, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    products, bmm = set(), torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: products.add(a.dtype) or bmm(a, b))
    ours = [x.detach().to(dtype).requires_grad_() for x in tensors(2, 3, 7, 8)]
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(*ours, None, 0.1)
    exact = [x.detach().float().requires_grad_() for x in ours]
    expected = scaled_dot_product_attention(*exact)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype), rtol=0.01, atol=near)
    check_alike(ours, found, exact, expected, found.detach(), rtol=0.05, atol=0.02)
    assert products == {torch.bfloat16 if near else torch.float32}
    assert calls == [LEVEL]


def test_for_the_backward_pass_no_weights_are_kept():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attend(*tensors(2, 3, 50, 8), None, 0.1)
    assert max(x.numel() for x in saved) == 2 * 3 * 50 * 8


def test_causal_attention_and_heads_that_share_keys(calls):
    q, k, v = tensors(2, 4, 7, 8)
    k, v = k[:, :2], v[:, :2]
    with dropout_by_row(None, (0, 1)):
        found = attention(q, k, v, dropout_p=0.1, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    assert calls == [LEVEL]


def test_a_learned_mask_and_other_shapes_are_computed_as_in_the_textbook(calls):
    """And so is everything on a GPU: with the same mask."""
    q, k, v = tensors(2, 3, 7, 8)
    learned = torch.zeros(2, 1, 7, 7, requires_grad=True)
    found = attend(q, k, v, learned, 0.1)
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v))
    found.square().sum().backward()
    assert learned.grad.abs().sum() > 0
    merged = [x.flatten(0, 1) for x in (q, k, v)]
    torch.testing.assert_close(attend(*merged, None, 0.1).unflatten(0, (2, 3)), found)
    seen = torch.ones(2, 1, 1, 7, dtype=torch.bool).index_fill_(0, torch.tensor([0]), False)
    assert attend(q, k, v, seen.requires_grad_(False), 0.1).isfinite().all()
    assert calls == [LEVEL]


def test_both_ways_drop_the_same_weights():
    q, k, v = tensors(3, 4, 9, 8)
    learned = torch.zeros(9, 9, requires_grad=True)
    found = []
    for mask in (None, learned):
        torch.manual_seed(0)
        found.append(attend(q, k, v, mask, 0.3))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("wrong", "rate"), [(torch.nan, 0.1), (torch.inf, 0.1), (torch.nan, 0.9999)])
def test_a_number_that_is_none_stays_visible(wrong, rate, dtype):
    query, key, value = tensors(2, 3, 50, 8)
    query.data[1, 2, 3] = wrong
    found = attend(*(x.to(dtype) for x in (query, key, value)), None, rate)
    assert found[1, 2, 3].isnan().all()
    assert not found[0].isnan().any()
