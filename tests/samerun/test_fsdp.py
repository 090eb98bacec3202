"""Which layers are sharded, and a sharded model's state; several processes: `launchers`, the parity table."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from samerun import fsdp
from samerun.checkpoint import TrainState, _restore_moments
from samerun.errors import InputError
from samerun.fsdp import FsdpSettings, layers_to_shard, shard
from samerun.optim_arguments import UNDER_FSDP
from samerun.optimizer import build_optimizer


class Layer(nn.Module):
    def __init__(self, scale=None):
        super().__init__()
        self.inner, self.parts = nn.Linear(7, 7), nn.ModuleList([nn.Linear(7, 7), nn.Identity()])
        self.scale = scale

    def forward(self, hidden):
        hidden = torch.tanh(self.inner(hidden))
        for part in self.parts:
            hidden = part(hidden)
        return hidden if self.scale is None else hidden * self.scale


class Model(nn.Module):
    """The head uses the words' vectors, two layers share a weight; with a buffer and a frozen weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(11, 7), nn.Embedding(5, 7).requires_grad_(False)
        shared = nn.Parameter(torch.rand(7))
        self.stages = nn.ModuleList([nn.ModuleList([Layer(), Layer()]), Layer(shared), Layer(shared)])
        self.register_buffer("seen", torch.zeros(7))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        hidden = self.words(tokens) + self.places(torch.arange(len(tokens)))
        self.seen += hidden.detach().mean(0)
        for layer in (*self.stages[0], *self.stages[1:]):
            hidden = layer(hidden)
        return self.head(hidden)


def chosen(**settings):
    model = Model()
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in layers_to_shard(model, FsdpSettings(**settings))]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["stages.0.1", "stages.0.0"]),  # the repeated ones that share no weights
        ({"auto_wrap_policy": "NO_WRAP"}, []),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 60}, ["stages.0.1", "stages.0.0"]),
        ({"transformer_layer_cls_to_wrap": ("Layer",)}, ["stages.0.1", "stages.0.0"]),
    ],
)
def test_layers_that_settings_name(settings, expected):
    assert chosen(**settings) == expected


def test_layers_that_share_a_weight_or_that_the_model_does_not_have():
    found = chosen(transformer_layer_cls_to_wrap=("Linear", "Embedding"))
    assert len(found) == 9
    assert {"words", "head"}.isdisjoint(found)
    with pytest.raises(InputError, match=r"has no BertLayer; its repeated layers are Layer$"):
        chosen(transformer_layer_cls_to_wrap=("Layer", "BertLayer"))


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model, steps, optimizer):
    for step in range(steps):
        torch.manual_seed(step)
        tokens = torch.randint(11, (5,))
        nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


# By --optim: --optim_args, and what it keeps.
KEPT = {
    "adamw_torch_fused": (None, {"exp_avg", "exp_avg_sq"}),
    "sgd": ("momentum=0.9", {"momentum_buffer"}),
    "rmsprop": ("momentum=0.9,centered=true", {"square_avg", "grad_avg", "momentum_buffer"}),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("optim", UNDER_FSDP)
def test_a_sharded_model_trains_as_it_is_and_its_state_goes_out_and_back(optim, offload, arguments):
    settings, device = FsdpSettings(offload_params=offload), torch.device("cpu")
    plain, sharded, other = Model(), Model(), Model()
    shard(sharded, settings, device, None)
    given, kept_states = KEPT[optim]
    build = partial(
        build_optimizer, arguments(optim=optim, optim_args=given), learning_rate=1e-3, scale_of=lambda *_: 1.0
    )
    ours, theirs = build(sharded), build(plain)
    train(sharded, 3, ours)
    train(plain, 3, theirs)
    with torch.no_grad():
        sharded(torch.arange(5))  # leaves gathered weights behind, as an evaluation does
        plain(torch.arange(5))
    weights = fsdp.full_weights(sharded, True)
    torch.testing.assert_close(weights, dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
    assert weights["head.weight"] is weights["words.weight"]
    fsdp.reshard(sharded)
    moments = fsdp.full_moments(sharded, ours, True)
    assert moments.keys() == kept_states
    trained = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    for kind, tensors in moments.items():
        expected = {name: theirs.state[parameter][kind] for name, parameter in trained.items()}
        torch.testing.assert_close(tensors, expected, rtol=1e-4, atol=1e-7)
    assert (fsdp.full_weights(sharded, False), fsdp.full_moments(sharded, ours, False)) == ({}, {})

    kept = copy.deepcopy((weights, moments))
    other.load_state_dict(weights)
    shard(other, settings, device, None)
    restored = build(other)
    _restore_moments(other, restored, moments, TrainState(updates=3))
    train(sharded, 2, ours)
    train(other, 2, restored)
    for name, tensor in fsdp.full_weights(other, True).items():
        assert torch.equal(tensor, fsdp.full_weights(sharded, True)[name]), name
        # What a writer holds does not change under its hands.
        assert torch.equal(weights[name], kept[0][name])


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("norm", [False, True])
def test_weights_are_gathered_in_half_precision_unless_a_batch_norm_has_statistics(norm):
    seen = []
    model = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7) if norm else nn.LayerNorm(7))
    model[0].register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    shard(model, FsdpSettings(), torch.device("cpu"), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.rand(3, 7)).float().sum().backward()
    assert seen == [torch.float32 if norm else torch.bfloat16]
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
