"""No step asks a tensor for its values, which on a GPU would make the host wait. tests/gpu/ has the GPU's own
word for it."""

import pytest
import torch
from step_models import KINDS, batches, build
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionMaskInterface

import samerun.kernels.bigbird.flex
import samerun.kernels.bigbird.layers
import samerun.training.step
from samerun.kernels.masks import mask_without_sync
from samerun.training.optimizer import build_optimizer
from samerun.training.step import train_step

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


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The paths of a GPU. FlexAttention, which these modes cannot watch, is replaced; its plans are made."""
    monkeypatch.setattr(
        samerun.kernels.bigbird.flex, "flex_attention", lambda q, k, v, *, score_mod, block_mask: q + k + v
    )
    monkeypatch.setattr(samerun.kernels.bigbird.layers, "FLEX_DEVICES", ("cpu",))
    monkeypatch.setattr(samerun.kernels.bigbird.layers, "is_usable", lambda *_: True)
    monkeypatch.setattr(samerun.training.step, "SYNCHRONOUS", ())
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", mask_without_sync)


# Gathered blocks look at a CPU's masks, never at a GPU's.
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "blocks"])
def test_a_step(kind, start_run, arguments):
    steps, model = batches(kind), build(kind)
    run = start_run(steps.plan.batch)
    model, optimizer = run.accelerator.prepare(
        model, build_optimizer(arguments(), model, 1e-3, lambda *_: 1.0)
    )
    with Operators(), Methods():
        loss, norm = train_step(run, model, optimizer, KINDS[kind][0], steps[1], 1.0)
    assert loss.isfinite()
    assert norm > 0


@pytest.mark.parametrize("ask", [torch.Tensor.tolist, bool, float, torch.Tensor.nonzero, torch.Tensor.cpu])
def test_asking_would_be_noticed(ask):
    with pytest.raises(AskedError), Operators(), Methods():
        ask(torch.ones(1))
