"""Embeddings of tokens that do not occur."""

import copy
import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional

from samerun.checkpoint import TrainState
from samerun.data.tokens import Ragged
from samerun.embeddings import train_occurring, with_others, without_others
from samerun.errors import TrainingError
from samerun.text.text import TextTask
from samerun.training import Training

IDS, RATE, DECAY = [0, 2, 5, 7], 0.1, 0.3
KNOWN = 12


def bag(**settings):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(KNOWN, 3, **settings), nn.Linear(3, 2))


def task(ids=IDS, **arguments):
    given = {"optim": "adamw_torch_fused", "ema_decay": None, **arguments}
    found = lambda model: None if ids is None else (model[0], np.array(ids))  # noqa: E731
    return SimpleNamespace(arguments=SimpleNamespace(**given), occurring_tokens=found)


def train(model, optimizer, steps):
    for step in steps:
        inputs = torch.tensor([[IDS[step % 4], 2, 7], [0, 2, IDS[-step % 3]]])
        functional.cross_entropy(model(inputs).mean(1), torch.tensor([0, 1])).backward()
        optimizer.step()
        optimizer.zero_grad()


def moments(model, optimizer):
    return {
        key: {name: optimizer.state[weight][key] for name, weight in model.named_parameters()}
        for key in ("exp_avg", "exp_avg_sq")
    }


def test_a_training_is_that_of_all_embeddings_and_goes_on_from_it():
    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    whole = bag(padding_idx=0)
    part, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    embedding = train_occurring(part, task(), keeps_others=True)
    assert embedding.weight.shape == (4, 3)
    both = adamw(whole), adamw(part)
    train(whole, both[0], range(5))
    train(part, both[1], range(5))
    embedding.decay = lambda: math.prod([1 - RATE * DECAY] * 5)
    weights = with_others(part, part.state_dict())
    torch.testing.assert_close(weights, dict(whole.state_dict()), rtol=1e-6, atol=1e-7)
    wide = {
        key: with_others(part, tensors, are_weights=False) for key, tensors in moments(part, both[1]).items()
    }
    torch.testing.assert_close(wide, moments(whole, both[0]), rtol=1e-6, atol=1e-9)

    train_occurring(resumed, task(), keeps_others=False)
    resumed.load_state_dict(whole.state_dict())
    assert torch.equal(without_others(resumed, wide["exp_avg"])["0.weight"], wide["exp_avg"]["0.weight"][IDS])
    inputs, other = torch.tensor(IDS), torch.tensor([[1, 2]])
    assert torch.equal(resumed(inputs), whole(inputs))
    torch.testing.assert_close(part.eval()(other), whole(other))
    for model in (part.train(), resumed.eval()):  # which does not keep the others
        with pytest.raises(TrainingError, match="occurring_tokens"):
            model(other)


def test_a_checkpoint_of_a_training_of_all_embeddings_has_the_others(subtests):
    """A GPU's: there weight decay has changed all."""
    saved = bag()
    for decay in (1.0, 0.5):
        with subtests.test(decay=decay):
            model = bag()
            embedding = train_occurring(model, task(), keeps_others=True)
            embedding.decay = lambda decay=decay: decay
            mine = with_others(model, model.state_dict())
            model.load_state_dict(mine)
            assert torch.equal(with_others(model, model.state_dict())["0.weight"], mine["0.weight"])
            with torch.no_grad():
                saved[0].weight.mul_(0.9)
            model.load_state_dict(saved.state_dict())
            found = with_others(model, model.state_dict())["0.weight"]
            torch.testing.assert_close(found, saved[0].weight.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        (task(optim="adafactor"), {}),
        (task(ema_decay=0.9), {}),
        (task(ids=None), {}),
        (task(ids=range(10)), {}),
        (task(), {"max_norm": 1.0}),
        (task(), {"sparse": True}),
        (task(), {"scale_grad_by_freq": True}),
    ],
)
def test_embeddings_that_all_change_or_nearly_all_occur_are_trained(asked, settings):
    model = bag(**settings)
    assert train_occurring(model, asked, keeps_others=True) is None
    assert type(model[0]) is nn.Embedding
    assert len(model[0].weight) == KNOWN


@pytest.mark.parametrize(("padding", "place"), [(5, 2), (6, None)])
def test_the_padding_token_may_be_one_that_does_not_occur(padding, place):
    model = bag(padding_idx=padding)
    embedding = train_occurring(model, task(), keeps_others=True)
    assert embedding.padding_idx == place
    model(torch.tensor([IDS])).sum().backward()


def test_shared_and_frozen_embeddings_stay():
    tied, frozen = nn.Sequential(nn.Embedding(KNOWN, 3), nn.Linear(3, KNOWN)), bag()
    tied[1].weight = tied[0].weight
    frozen[0].weight.requires_grad_(False)
    adapted = get_peft_model(bag(), LoraConfig(target_modules=["0"])).base_model.model
    assert [train_occurring(model, task(), True) for model in (tied, frozen, adapted)] == [None] * 3


def test_the_others_get_the_weight_decay_of_all_updates():
    """Each by the learning rate and the weight decay that it had."""
    plan = SimpleNamespace(learning_rate=0.1, lr_multiplier=lambda update: 1 / (update + 1))
    run, asked, model = Mock(is_main=True, deepspeed_config=None), task(weight_decay=0.5), bag()
    run.accelerator.optimizer_step_was_skipped = False
    asked.learning_rate_scale = lambda _, name: {"0.weight": 2}[name]
    known = {"run": run, "task": asked, "arguments": asked.arguments, "plan": plan, "average": None}
    training = SimpleNamespace(**known, state=TrainState())
    Training._train_occurring(training, model)
    for _ in range(2):
        Training._count_update(training, False)
    assert model[0].decay() == pytest.approx((1 - 0.1) * (1 - 0.05))


class Tokenizer:
    all_special_ids = (0, 1)

    def __call__(self, text):
        return {"input_ids": [2, 3]}  # around every text


def test_a_text_task_knows_the_ids_of_its_inputs():
    """Those of test rows are read by the exported model, which has all."""
    splits = {
        name: SimpleNamespace(lengths=np.array([2, 1]), tokens=Ragged.of([[5, each], [9]]))
        for name, each in (("train", 6), ("validation", 7), ("test", 8))
    }
    embedding = nn.Embedding(12, 2)
    model = SimpleNamespace(get_input_embeddings=lambda: embedding, config=SimpleNamespace(pad_token_id=4))
    given = {"splits": splits, "buffers": None, "launch": SimpleNamespace(use_cpu=True)}
    known = SimpleNamespace(**given, tokenizer=Tokenizer())
    found, ids = TextTask.occurring_tokens(known, model)
    assert (found, ids.tolist()) == (embedding, [0, 1, 2, 3, 4, 5, 6, 7, 9])
    for change in ({"buffers": "a stream"}, {"launch": SimpleNamespace(use_cpu=False)}):
        assert TextTask.occurring_tokens(SimpleNamespace(**given | change, tokenizer=None), model) is None
