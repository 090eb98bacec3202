"""Attention with dropout: torch's own but for the noise, in every model whose attention is transformers' sdpa."""

import copy
from collections import Counter

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
)

import noise.attention
from noise.attention import attend, noisy_attention, use_fast_dropout

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}


@pytest.fixture
def without_noise(monkeypatch):
    """Asks for noise and gets none, so that what is left can be compared."""
    asked = []
    monkeypatch.setattr(noise.attention, "drop", lambda x, p: asked.append(p) or x)
    return asked


def tensors(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, requires_grad=True) for _ in range(3)]


def mask_of(kind):
    real = torch.arange(7) < torch.tensor([[7], [4]])
    masks = {"none": None, "keys": real[:, None, None], "pairs": real[:, None, None].expand(2, 1, 7, 7)}
    masks["added"] = torch.randn(2, 1, 7, 7, generator=torch.Generator().manual_seed(1))
    return masks[kind]


@pytest.mark.parametrize("mask", ["none", "keys", "pairs", "added"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_but_for_the_noise_it_is_torchs(mask, scale, without_noise):
    ours, theirs = tensors(2, 3, 7, 8), tensors(2, 3, 7, 8)
    found = noisy_attention(*ours, mask_of(mask), 0.1, scale)
    expected = scaled_dot_product_attention(*theirs, attn_mask=mask_of(mask), scale=scale)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert without_noise == [0.1]


def test_half_precision_is_computed_in_single(without_noise):
    q, k, v = (x.detach().bfloat16() for x in tensors(2, 3, 7, 8))
    with torch.autocast("cpu", torch.bfloat16):
        found = noisy_attention(q, k, v, None, 0.1)
    expected = scaled_dot_product_attention(q.float(), k.float(), v.float()).bfloat16()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0)
    assert without_noise == [0.1]


def test_the_expectation_is_that_without_noise():
    q, k, v = (x.detach() for x in tensors(1, 1, 7, 8))
    torch.manual_seed(0)
    many = torch.stack([noisy_attention(q, k, v, None, 0.2) for _ in range(4000)])
    expected = scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(many.mean(dim=0), expected, atol=5 * float(many.std(dim=0).max()) / 4000**0.5, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_without_a_mask_may_be_causal(causal, without_noise):
    q, k, v = tensors(2, 3, 7, 8)
    found, weights = attend(torch.nn.Module(), q, k, v, None, dropout=0.1, is_causal=causal)
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    assert weights is None
    assert without_noise == [0.1]


def test_what_it_does_not_know_is_transformers_own(without_noise):
    q, k, v = tensors(2, 4, 7, 8)
    layer = torch.nn.Module()
    layer.num_key_value_groups = 2
    attend(layer, q, k[:, :2], v[:, :2], None, dropout=0.1, is_causal=False)  # heads that share keys
    layer.num_key_value_groups = 1
    attend(layer, q, k, v, None, dropout=0.1, is_causal=False, position_bias=torch.zeros(2, 4, 7, 7))
    attend(layer, q, k, v, None, dropout=0.0, is_causal=False)
    assert without_noise == []


class Drawn(TorchDispatchMode):
    """Counts operations that draw noise of torch's."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.bernoulli_, torch.ops.aten.native_dropout):
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def classifier(kind):
    torch.manual_seed(0)
    known = AutoConfig.for_model(kind).to_dict()
    config = AutoConfig.for_model(kind, num_labels=3, **{k: v for k, v in {**SIZES, **DISTIL}.items() if k in known})
    return AutoModelForSequenceClassification.from_config(config)


def writer():
    torch.manual_seed(0)
    decoder = BertLMHeadModel(BertConfig(**SIZES, is_decoder=True, add_cross_attention=True))
    return EncoderDecoderModel(encoder=BertModel(BertConfig(**SIZES)), decoder=decoder)


MODELS = {kind: lambda kind=kind: classifier(kind) for kind in ("bert", "roberta", "electra", "distilbert")} | {
    "writer": writer
}


@pytest.mark.parametrize("kind", MODELS)
def test_no_noise_of_a_model_is_torchs(kind):
    model = MODELS[kind]().train()
    ids = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "attention_mask": (torch.arange(9) < torch.tensor([[9], [5], [7]])).long()}
    if kind == "writer":
        given |= {"decoder_input_ids": ids[:, :4], "use_cache": False}
    plain, names = copy.deepcopy(model), list(model.state_dict())
    use_fast_dropout(model)
    assert list(model.state_dict()) == names
    with Drawn() as drawn:
        first = model(**given).logits
    assert drawn.calls == {}
    first.square().sum().backward()
    assert not torch.equal(first, model(**given).logits)
    torch.testing.assert_close(model.eval()(**given).logits, plain.eval()(**given).logits)
    assert "attend" not in str(model.config)


def test_a_run_of_a_model_is_repeated_by_its_seed():
    model = classifier("bert").train()
    use_fast_dropout(model)
    ids = torch.randint(3, 60, (3, 9))
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(model(input_ids=ids).logits)
    assert torch.equal(*found)
