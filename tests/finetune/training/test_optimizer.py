import pytest
import torch
from torch import nn

from finetune.training.optimizer import build_optimizer, set_learning_rate


class RMSNorm(nn.Module):
    """A norm of somebody's own, with a matrix of scales."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 2))


class Biaffine(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(2, 2))


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
    assert found == {
        "bert.embed.weight": (0.1, 1e-3),
        "bert.dense.weight": (0.1, 1e-3),
        "bert.dense.bias": (0.0, 1e-3),
        "bert.norm.weight": (0.0, 1e-3),
        "bert.norm.bias": (0.0, 1e-3),
        "bert.own.scale": (0.0, 1e-3),
        "bert.pairs.bias": (0.0, 1e-3),
        "bert.scale.weight": (0.0, 1e-3),
        "bert.scale.bias": (0.0, 1e-3),
        "classifier.weight": (0.1, 1e-2),
        "classifier.bias": (0.0, 1e-2),
    }
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(found)


def test_a_model_without_a_head_has_two_groups(arguments):
    assert [group["peak_lr"] for group in build_optimizer(arguments(), nn.Linear(3, 2), 1e-3, one).param_groups] == [1e-3, 1e-3]


def test_arguments_reach_adamw(arguments):
    asked = arguments(adam_beta1=0.8, adam_beta2=0.7, adam_epsilon=1e-5)
    (group,) = build_optimizer(asked, nn.Linear(3, 2, bias=False), 1e-3, one).param_groups
    assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.7), 1e-5, 1e-3)


def test_learning_rate_is_a_share_of_each_groups_peak(arguments):
    optimizer = build_optimizer(arguments(), Classifier(), 1e-3, head_scale)
    for multiplier in (0.5, 0.0, 0.25):  # not one on top of the other
        set_learning_rate(optimizer, multiplier)
        assert {group["lr"] for group in optimizer.param_groups} == {1e-3 * multiplier, 1e-2 * multiplier}


def test_no_decay_means_none(arguments):
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(arguments(weight_decay=0.5), model, 0.1, one)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.bias, before["bias"], rtol=0, atol=0)
    torch.testing.assert_close(model.weight, before["weight"] * (1 - 0.1 * 0.5))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model.weight, before["weight"])
