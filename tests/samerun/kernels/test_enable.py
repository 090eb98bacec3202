"""When kernels are used. Each kernel's own tests compare it with its reference."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny_models import sizes
from transformers import BertConfig, BertForSequenceClassification, BigBirdConfig, BigBirdModel
from transformers.activations import NewGELUActivation
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from samerun.kernels.bigbird import FastBigBirdAttention, FusedGELU
from samerun.kernels.common import row_lengths
from samerun.text.text import TextTask

SIZES = sizes(32, 1, 4, 48)


def big_bird():
    torch.manual_seed(0)
    config = BigBirdConfig(
        **SIZES, block_size=4, num_random_blocks=1, max_position_embeddings=128, hidden_act="gelu_new"
    )
    return BigBirdModel(config, add_pooling_layer=False)


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES))


def kinds(model):
    return [type(module) for module in model.modules()]


def with_kernels(model, attention=None):
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 1}, padding_side="right")
    documents = SimpleNamespace(prepare=lambda model, side: model)
    return TextTask.with_kernels(
        SimpleNamespace(
            arguments=SimpleNamespace(attn_implementation=attention),
            tokenizer=tokenizer,
            long_documents=documents,
        ),
        model,
    )


def test_a_big_bird_has_our_kernels():
    found = set(kinds(with_kernels(big_bird())))
    assert {FastBigBirdAttention, FusedGELU} <= found
    assert not {BigBirdBlockSparseAttention, NewGELUActivation} & found
    assert kinds(with_kernels(bert())) == kinds(bert())


@pytest.mark.parametrize("make", [big_bird, bert])
def test_eager_leaves_everything_to_torch_and_transformers(make):
    plain = make().train()
    model = copy.deepcopy(plain)
    with_kernels(model, "eager")
    assert kinds(model) == kinds(plain)
    assert model.config._attn_implementation == plain.config._attn_implementation
    results = []
    for one in (model, plain):  # the same bits, dropout included
        torch.manual_seed(1)
        ids = torch.randint(3, 60, (2, 64), generator=torch.Generator().manual_seed(2))
        mask = (torch.arange(64) < torch.tensor([[64], [50]])).long()
        with row_lengths((64, 50)):
            found = one(input_ids=ids, attention_mask=mask)[0]
        found.square().sum().backward()
        results.append([found, *(p.grad for p in one.parameters())])
    assert all(map(torch.equal, *results))
