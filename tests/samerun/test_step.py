import math

import numpy as np
import pytest
import torch
from linear_task import LinearTask, collator, linear_layer, points

from samerun.data.batches import collate_share
from samerun.plan import BatchShape
from samerun.train import _clip, seed_step, train_step

NOTHING = np.array([], dtype=int)


def torch_step(layer, x, y, max_norm):
    """One step of plain gradient descent on the mean over all of `x`; returns (loss, norm before
    clipping)."""
    layer.zero_grad()
    loss = (layer(x) - y).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), max_norm or math.inf)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter -= 0.1 * parameter.grad
    return loss.item(), norm.item()


@pytest.mark.parametrize("max_norm", [0.0, 0.3, 100.0])
@pytest.mark.parametrize(
    "shares",
    [
        [range(8)],
        [range(5), range(5, 8)],
        [[0], [1, 2, 3, 4], [5, 6, 7]],
        [range(8), NOTHING],  # a pass without rows, as the last batch of an epoch has them
        [NOTHING, [0, 1, 2], range(3, 8)],
        [[row] for row in range(8)],
    ],
)
def test_a_step_is_that_of_one_big_batch(start_run, shares, max_norm):
    x, y = points(16)
    run = start_run(BatchShape(8, 1, 8, len(shares)))
    ours, plain = linear_layer(), linear_layer()
    model, optimizer = run.accelerator.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    for first in (0, 8):
        rows = [first + np.array(share, dtype=int) for share in shares]
        micro_batches = [collate_share(collator(x, y), share, np.arange(16)) for share in rows]
        loss, norm = train_step(run, model, optimizer, LinearTask(), micro_batches, max_norm)
        expected_loss, expected_norm = torch_step(plain, x[first : first + 8], y[first : first + 8], max_norm)
        assert float(loss) == pytest.approx(expected_loss, rel=1e-6)
        assert float(norm) == pytest.approx(expected_norm, rel=1e-6)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)
    assert 0.3 < expected_norm < 100  # one of the limits clips, the others do not


@pytest.mark.parametrize("size", [0.0, 0.1, 100.0, math.inf, math.nan])
def test_gradients_are_clipped_to_the_bits_of_torch_and_not_written_to_in_vain(start_run, size):
    run, ours, theirs = start_run(), linear_layer(), linear_layer()
    for layer in (ours, theirs):
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, size)
    written = ours.weight.grad._version
    norm, expected = _clip(run, ours, 1.0), torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=0, equal_nan=True)
    assert (ours.weight.grad._version == written) == (size <= 0.1)


class Watched(LinearTask):
    """Notes for every pass whether its gradients are exchanged between processes."""

    def __init__(self, accelerator):
        super().__init__()
        self.seen, self.accelerator = [], accelerator

    def loss_sum(self, model, batch):
        self.seen.append(self.accelerator.sync_gradients)
        return super().loss_sum(model, batch)


def test_gradients_are_exchanged_in_the_last_pass_only(start_run):
    run, layer = start_run(BatchShape(6, 1, 2, 3)), linear_layer()
    model, optimizer = run.accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    task = Watched(run.accelerator)
    micro_batches = [collator(*points(8))(np.arange(first, first + 2)) for first in (0, 2, 4)]
    for _ in range(2):
        train_step(run, model, optimizer, task, micro_batches, 1.0)
    assert task.seen == [False, False, True] * 2


def test_a_step_of_weight_zero_moves_nothing(start_run):
    run, layer = start_run(), linear_layer()
    model, optimizer = run.accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    train_step(run, model, optimizer, LinearTask(), [collator(*points(8))(np.arange(8))], 1.0, weight=0.0)
    torch.testing.assert_close(layer.state_dict(), linear_layer().state_dict(), rtol=0, atol=0)


def test_a_step_of_placeholders_only_is_zero_not_nan(start_run):
    run, layer = start_run(), linear_layer()
    model, optimizer = run.accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    batch = collate_share(collator(*points(8)), NOTHING, np.arange(8))
    loss, norm = train_step(run, model, optimizer, LinearTask(), [batch], 1.0)
    assert (float(loss), float(norm)) == (0, 0)


def test_noise_is_a_function_of_seed_step_and_rank():
    def noise(*place):
        seed_step(*place)
        return tuple(torch.rand(4).tolist())

    places = [(seed, step, rank) for seed in (0, 1, 2**31 - 1) for step in range(3) for rank in range(3)]
    assert len({noise(*place) for place in places}) == len(places)
    assert noise(1, 2, 0) == noise(1, 2, 0)
