import pytest
import torch

from samerun.kernels import block_attention as portions
from samerun.kernels.bigbird import Shape, read_rows
from samerun.kernels.block_attention import portions_of

LENGTHS = (90, 33, 96, 40, 5, 90)


def parts(heads, lengths=LENGTHS, size=4):
    """The portions of a batch of rows of these lengths, in blocks of 8; and a tensor of its shape."""
    mask = torch.arange(96) < torch.tensor(lengths)[:, None]
    rows = read_rows(mask, Shape(seeds=(0,), heads=heads, num_random_blocks=1, block_size=8, positions=96))
    x = torch.randn(len(lengths), 96, heads, size)
    return list(portions_of(rows, [None] * len(rows.groups), x)), x, mask


@pytest.mark.parametrize("elements", [1, 500, 2000, 10**6])
@pytest.mark.parametrize("heads", [1, 5, 12])
def test_what_is_taken_and_put_is_everything_once(elements, heads, monkeypatch):
    monkeypatch.setattr(portions, "PORTION", elements)
    found, x, mask = parts(heads)
    back = torch.zeros_like(x)
    for portion in found:
        taken = portion.take(x)
        assert taken.shape[1:] == (portion.blocks, 8, 4)
        assert len(taken) == len(portion.real) == len(portion.bias)
        assert torch.equal(portion.real.squeeze(-1), portion.bias == 0)
        before = back.clone()
        portion.put(taken, back)
        assert not before[back != before].any()  # nobody else's
    own = (mask.view(len(mask), -1, 8).any(-1).repeat_interleave(8, dim=1))[..., None, None]
    torch.testing.assert_close(back, x * own, rtol=0, atol=0)


def test_rows_are_cut_into_heads_and_gathered_evenly(monkeypatch):
    def sizes(elements, lengths):
        monkeypatch.setattr(portions, "PORTION", elements)
        return [len(portion.real) for portion in parts(12, lengths)[0]]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert sizes(1, (96,)) == [1] * 12
    assert sizes(3 * 96 * 4, (96,)) == [3] * 4
    assert sizes(10**6, (96,)) == [6, 6]  # each of the threads has some
    assert sizes(10**6, (96,) * 5) == [24, 24, 12]
    assert sizes(8 * 96 * 4, (96, 96)) == [6] * 4  # not 8, 4, 8, 4
