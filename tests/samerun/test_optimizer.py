from dataclasses import replace

import pytest
import torch
from torch import nn

from samerun import optim_arguments
from samerun.optimizer import build_optimizer, set_learning_rate, state_bytes

ZERO = {"zero_optimization": {"stage": 2}}


def test_what_works_on_whole_weights_is_refused_under_zero_and_fsdp(monkeypatch):
    monkeypatch.setattr(optim_arguments, "is_installed", lambda name: True)
    names = list(optim_arguments.OPTIMIZERS)
    working = ["adamw_torch_fused", "sgd", "rmsprop", "lion_32bit"]
    assert [name for name in names if not optim_arguments.check_launch(name, ZERO, "ds.json")] == working
    assert optim_arguments.check_launch("adafactor", ZERO, "ds.json") == [
        "--optim adafactor does not work under ZeRO: it averages over the rows and columns of whole "
        f"matrices. Launch without DeepSpeed (accelerate_configs/ddp.yaml), or choose {', '.join(working)}"
    ]
    under_fsdp = [name for name in names if not optim_arguments.check_launch(name, None, None, True)]
    assert under_fsdp == ["adamw_torch_fused", "sgd", "rmsprop"]
    assert not any(optim_arguments.check_launch(name, None, None) for name in names)


def test_a_deepspeed_file_that_names_adamw_contradicts_another_optimizer():
    named = {**ZERO, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    assert optim_arguments.check_launch("adamw_torch_fused", named, "ds.json") == []
    (message,) = optim_arguments.check_launch("sgd", named, "ds.json")
    assert message == "ds.json: its section 'optimizer' asks for AdamW but --optim is sgd; remove the section"


@pytest.mark.parametrize("optim", ["lion_32bit", "adamw_bnb_8bit"])
def test_what_is_not_installed_is_known_at_once(optim, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (message,) = optim_arguments.check_launch(optim, None, None)
    assert message == f"--optim {optim}: bitsandbytes is not installed (pip install -r requirements-8bit.txt)"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "adamw_torch_fused; its state: 8 bytes per trained element"),
        ({"optim": "rmsprop", "optim_args": "eps=1e-8, centered=true ,momentum=0.9"},
         "rmsprop momentum=0.9 centered=True; its state: 12 bytes per trained element"),
        ({"optim": "sgd"}, "sgd; its state: 0 bytes per trained element"),
    ],
)  # fmt: skip
def test_an_optimizer_in_words(arguments, given, words):
    assert optim_arguments.describe(arguments(**given)) == words


class RMSNorm(nn.Module):
    """A norm of somebody's own, with a matrix of scales."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 2))


class Biaffine(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(2, 2))
        self.relative_attention_bias = nn.Embedding(2, 2)  # as in T5


class Classifier(nn.Module):
    base_model_prefix = "bert"

    def __init__(self):
        super().__init__()
        self.bert = nn.ModuleDict(
            {"embed": nn.Embedding(5, 4), "dense": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "own": RMSNorm()}
        )
        self.bert["scale"] = nn.BatchNorm1d(4)
        self.bert["pairs"] = Biaffine()
        self.classifier = nn.Linear(4, 2)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.bert["embed"].weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def one(model, name):
    return 1.0


def head_scale(model, name):
    return 1.0 if name.startswith("bert.") else 10.0


def groups_of(model, optimizer):
    """name -> (its group's weight decay, its peak learning rate)"""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["weight_decay"], group["peak_lr"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_what_decays_and_what_learns_faster(arguments):
    model = Classifier()
    optimizer = build_optimizer(arguments(weight_decay=0.1), model, 1e-3, head_scale)
    found = groups_of(model, optimizer)
    undecayed = ("dense.bias", "norm.weight", "norm.bias", "own.scale", "pairs.bias", "scale.weight")
    undecayed += ("pairs.relative_attention_bias.weight",)
    assert found == {
        **dict.fromkeys(("bert.embed.weight", "bert.dense.weight"), (0.1, 1e-3)),
        **{f"bert.{name}": (0.0, 1e-3) for name in (*undecayed, "scale.bias")},
        **{"classifier.weight": (0.1, 1e-2), "classifier.bias": (0.0, 1e-2)},
    }
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(found)


def test_learning_rate_is_a_share_of_each_groups_peak(arguments):
    optimizer = build_optimizer(arguments(), Classifier(), 1e-3, head_scale)
    for multiplier in (0.5, 0.0, 0.25):  # not one on top of the other
        set_learning_rate(optimizer, multiplier)
        assert {group["lr"] for group in optimizer.param_groups} == {1e-3 * multiplier, 1e-2 * multiplier}


@pytest.mark.parametrize(
    ("optim", "optim_args", "expected"),
    [
        ("adamw_torch_fused", "beta1=0.8,beta2=0.7,eps=1e-5", {"betas": (0.8, 0.7), "eps": 1e-5, "lr": 1e-3}),
        ("sgd", "momentum=0.9, nesterov=True",
         {"momentum": 0.9, "dampening": 0, "nesterov": True, "fused": True, "peak_lr": 1e-3}),
        ("rmsprop", "alpha=0.9,centered=1", {"alpha": 0.9, "centered": True}),
        ("adagrad", "eps=1e-6", {"eps": 1e-6}),
        ("adafactor", "d=2", {"d": 2, "beta2_decay": -0.8}),
    ],
)  # fmt: skip
def test_settings_reach_the_optimizer(arguments, optim, optim_args, expected):
    asked = arguments(optim=optim, optim_args=optim_args)
    (group,) = build_optimizer(asked, nn.Linear(3, 2, bias=False), 1e-3, one).param_groups
    assert {name: group[name] for name in expected} == expected
    if optim == "sgd":
        on_gpu = build_optimizer(asked, nn.Linear(3, 2), 1e-3, one, device_type="cuda")
        assert not on_gpu.param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        *[(optim, None) for optim in optim_arguments.OPTIMIZERS],
        ("sgd", "momentum=0.9"),
        ("rmsprop", "momentum=0.9,centered=true"),
    ],
)
def test_what_an_optimizer_will_keep(arguments, optim, optim_args):
    if optim in ("adamw_bnb_8bit", "lion_32bit"):
        pytest.importorskip("bitsandbytes")
    model = nn.Sequential(nn.Linear(80, 70), nn.Conv2d(3, 5, 2), nn.Linear(70, 4))
    model[2].bias.requires_grad_(False)
    asked = arguments(optim=optim, optim_args=optim_args)
    optimizer = build_optimizer(asked, model, 1e-3, one)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    counted = ("step", "qmap1", "qmap2")  # as large for any weight
    states = [(key, value) for state in optimizer.state.values() for key, value in state.items()]
    kept = sum(value.nbytes for key, value in states if key not in counted and value is not None)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert state_bytes(asked, model) * trained == pytest.approx(kept)
    assert state_bytes(replace(asked, ema_decay=0.9), model) == state_bytes(asked, model) + 4
