"""Two processes normalise as one does that has the rows of both."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from samerun.models.sync_batch_norm import allow_single_values, synchronise_batch_norm

ROWS = (5, 2)  # of each process


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2), nn.BatchNorm1d(2)
    )


def train(model, x, y, sum_gradients):
    """Two steps of SGD on a loss summed over rows: (outputs, state) at the end."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(2):
        output = model(x)
        (output - y).square().sum().backward()
        for parameter in model.parameters():
            sum_gradients(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return output.detach(), model.state_dict()


def data():
    x, y = torch.randn(sum(ROWS), 38, generator=torch.Generator().manual_seed(1)).split((36, 2), dim=1)
    # A mean far from zero: squares that are subtracted from each other would lose it in fp32.
    return 50 + x.view(-1, 1, 6, 6), y


def one_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x, y = (tensor.split(ROWS)[rank] for tensor in data())
    model = synchronise_batch_norm(network(), on_gpu=False)
    outputs, state = train(model, x, y, dist.all_reduce)
    torch.save((outputs, state), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    torch.multiprocessing.spawn(one_rank, (str(tmp_path),), nprocs=2)
    model = network()
    outputs, state = train(model, *data(), lambda gradient: None)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    torch.testing.assert_close(torch.cat([each[0] for each in found]), outputs, rtol=1e-4, atol=1e-4)
    for _, theirs in found:
        assert theirs.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_single_value_is_normalised_by_the_running_statistics():
    torch.manual_seed(0)
    expected, model = network(), allow_single_values(network())
    model.load_state_dict(expected.state_dict())
    x, y = data()
    assert torch.equal(train(model, x, y, id)[0], train(expected, x, y, id)[0])
    norm, row = model[-1], torch.randn(1, 2, requires_grad=True)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    found = norm(row)
    found.sum().backward()
    assert torch.equal(found, norm.eval()(row))
    assert row.grad.abs().min() > 0
    assert all(torch.equal(value, norm.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("replace", [allow_single_values, lambda model: synchronise_batch_norm(model, False)])
def test_half_weights_beside_whole_statistics(replace, training):
    """As under DeepSpeed's bf16 and fp16. plain torch: expected scalar type BFloat16 but found Float"""
    torch.manual_seed(0)
    x, expected = torch.randn(6, 3, 4, 4).bfloat16(), nn.BatchNorm2d(3).train(training)
    nn.init.normal_(expected.weight)
    expected.weight.data = expected.weight.bfloat16().float()
    norm = replace(nn.BatchNorm2d(3)).train(training)
    norm.load_state_dict(expected.state_dict())
    norm.weight.data, norm.bias.data = norm.weight.bfloat16(), norm.bias.bfloat16()
    found = norm(x)
    assert torch.equal(found, expected(x))
    found.float().square().sum().backward()
    assert (norm.weight.grad.dtype, norm.running_mean.dtype) == (torch.bfloat16, torch.float32)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(norm, name), getattr(expected, name))


def test_a_dry_run_for_a_gpu_waits_for_no_other_process(monkeypatch):
    model = synchronise_batch_norm(network(), True)
    assert model.state_dict().keys() == network().state_dict().keys()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ValueError, match="expected input tensor to be on"):
            nn.SyncBatchNorm.forward(model[-1], torch.ones(3, 2))
        assert model[-1](torch.ones(3, 2)).shape == (3, 2)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_sums_are_precise_on_a_cpu(momentum):
    """Mostly background, as in MNIST: torch's batch norm is off by 1e-4 here."""
    torch.manual_seed(0)
    x = (torch.rand(64, 8, 26, 26) > 0.9) * torch.rand(64, 8, 26, 26) - 1
    weight = torch.randn_like(x)

    def outcome(norm, dtype):
        values = x.to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
        norm = norm.to(dtype)
        output = norm(values)
        (output * weight.to(dtype)).sum().backward()
        return [output, values.grad, *(p.grad for p in norm.parameters()), *norm.buffers()]

    exact = outcome(nn.BatchNorm2d(8, momentum=momentum), torch.float64)
    found = outcome(allow_single_values(nn.BatchNorm2d(8, momentum=momentum)), torch.float32)
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).abs().max() <= 3e-6 * theirs.abs().max()
