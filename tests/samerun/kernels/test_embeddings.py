import copy

import pytest
import torch
from torch import nn

from samerun.kernels import embeddings
from samerun.kernels.embeddings import reuse_gradient_memory


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch):
    monkeypatch.setattr(embeddings, "LARGE", 30)


class Reader(nn.Module):
    """Two lookups in one weight, of which one takes row 0 for padding, and one in another weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 4, padding_idx=0)
        self.titles = nn.Embedding(11, 4)
        self.titles.weight = self.words.weight
        self.places = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids, title):
        read = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(read).square().sum() + self.head(self.titles(title)).pow(3).sum()


def passes(number):
    generator = torch.Generator().manual_seed(number)
    return [[torch.randint(0, 11, (3, size), generator=generator) for size in (7, 4)] for _ in range(2)]


def test_gradients_are_those_of_torch_over_passes_and_steps():
    plain, kept = Reader().double(), Reader().double()
    assert [weight.shape for weight in reuse_gradient_memory(kept)] == [(11, 4), (9, 4)]
    places = set()
    for step in range(4):
        for batch in passes(step):
            for model in (plain, kept):
                model(*batch).backward()
            for (name, ours), theirs in zip(kept.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9, msg=name)
        places.add(kept.words.weight.grad.data_ptr())
        for model in (plain, kept):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1e-3 * parameter.grad
            model.zero_grad()
    assert len(places) == 1
    torch.testing.assert_close(kept.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)


def test_one_pass_gives_torchs_bits():
    ids = torch.randint(0, 500, (8, 300), generator=torch.Generator().manual_seed(0))
    weights = []
    for keep in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(500, 16))
        assert len(reuse_gradient_memory(model) if keep else [0]) == 1
        torch.manual_seed(1)
        model(ids).backward(torch.randn(8, 300, 16))
        weights.append(model[0].weight.grad)
    assert torch.equal(*weights)


def test_rows_of_an_earlier_step_are_gone_also_after_a_scaling():
    model = nn.Sequential(nn.Embedding(20, 2))
    reuse_gradient_memory(model)
    model(torch.tensor([1, 2, 2])).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.zero_grad()
    model(torch.tensor([3])).sum().backward()
    assert model[0].weight.grad.nonzero()[:, 0].unique().tolist() == [3]


def test_a_gradient_that_somebody_has_set_is_added_to():
    model = nn.Sequential(nn.Embedding(20, 2))
    reuse_gradient_memory(model)
    model[0].weight.grad = torch.ones(20, 2)
    model(torch.tensor([1])).sum().backward()
    assert model[0].weight.grad.sum() == 40 + 2
    model.zero_grad()
    model(torch.tensor([2])).sum().backward()
    assert model[0].weight.grad.sum() == 2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.head.weight = self.words.weight


@pytest.mark.parametrize(
    "model",
    [
        Tied(),  # whose output layer gives every row a gradient
        nn.Embedding(11, 4).requires_grad_(False),
        nn.Embedding(11, 4, sparse=True),
        nn.Embedding(11, 4, scale_grad_by_freq=True),
        nn.Embedding(11, 4, max_norm=1.0),
        nn.Embedding(5, 4),
        nn.Linear(11, 4),
    ],
)
def test_what_is_left_to_torch(model):
    model = nn.Sequential(model)
    before = [type(module) for module in model.modules()]
    assert reuse_gradient_memory(model) == []
    assert [type(module) for module in model.modules()] == before


def test_nothing_changes_but_the_gradients_place():
    model = Reader()
    state = copy.deepcopy(model.state_dict())
    reuse_gradient_memory(model)
    assert list(model.state_dict()) == list(state)
    with torch.no_grad():
        assert torch.equal(model.words(torch.tensor([3])), state["words.weight"][3:4])
    frozen = model.places.requires_grad_(False)
    assert not frozen(torch.tensor([1])).requires_grad
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one(*passes(0)[0]).backward()
    assert twin.words.weight.grad.data_ptr() != model.words.weight.grad.data_ptr()
