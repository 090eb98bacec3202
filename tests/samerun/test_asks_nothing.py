"""A step asks no tensor for its values, which on a GPU makes the host wait; on GPUs: tests/gpu/."""

import pytest
import torch
from tiny_models import KINDS, batches, build, prepared
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from samerun import training
from samerun.training import train_step

ASKING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.cpu}
WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class AskedError(AssertionError):
    pass


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in WAITING:
            raise AskedError(func)
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in ASKING:
            raise AskedError(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["padded", "titles"])
def test_a_step(kind, start_run, arguments, monkeypatch):
    monkeypatch.setattr(training, "SYNCHRONOUS", ())  # as on a GPU
    steps, model = batches(kind), build(kind)
    run = start_run(steps.plan.batch)
    model, optimizer = prepared(run, model, arguments())
    with Operators(), Methods():
        loss, norm = train_step(run, model, optimizer, KINDS[kind][0], steps[1], 1.0)
    assert loss.isfinite()
    assert norm > 0


@pytest.mark.parametrize("ask", [torch.Tensor.tolist, bool, float, torch.Tensor.nonzero, torch.Tensor.cpu])
def test_asking_would_be_noticed(ask):
    with pytest.raises(AskedError), Operators(), Methods():
        ask(torch.ones(1))
