"""Compiled FlexAttention against the gathered blocks and against plain transformers, on a GPU."""

import copy

import pytest
import torch
from transformers import BigBirdConfig, BigBirdModel

import samerun.kernels.bigbird.layers
from samerun.kernels.bigbird.flex import is_usable
from samerun.kernels.bigbird.layers import use_bigbird_attention
from samerun.kernels.row_lengths import row_lengths

GPU = torch.device("cuda")
LENGTHS = [(705,), (1024, 705, 64), (1536, 1000, 704), (2048, 2047), (4096,), (4096, 1, 3000, 900)]


def encoder(layers=2):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 256,
    }
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1}
    return BigBirdModel(BigBirdConfig(**sizes, **calm, vocab_size=90), add_pooling_layer=False).to(GPU)


def batch(lengths):
    width = -(-max(lengths) // 64) * 64
    ids = torch.randint(3, 90, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([torch.arange(width) < n for n in lengths]).long()
    return ids.to(GPU), mask.to(GPU)


def results(model, ids, mask, lengths, precision):
    """States of real tokens and gradients of every parameter but keys' biases, to which a softmax is
    blind."""
    model.zero_grad()
    weights = torch.randn(*ids.shape, 128, generator=torch.Generator().manual_seed(2)).to(GPU)
    with (
        row_lengths(lengths),
        torch.autocast("cuda", precision or torch.bfloat16, enabled=precision is not None),
    ):
        states = model(input_ids=ids, attention_mask=mask)[0].float() * mask[..., None]
    (states * weights).sum().backward()
    return [
        states.detach(),
        *(p.grad.clone() for name, p in model.named_parameters() if not name.endswith("key.bias")),
    ]


def assert_close(found, expected, forward, backward):
    assert (found[0] - expected[0]).abs().max() <= forward * expected[0].abs().max()
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert (ours - theirs).norm() <= backward * theirs.norm().clamp(min=1)


@pytest.fixture
def attended(monkeypatch):
    """How often FlexAttention attended."""
    calls = []
    function = samerun.kernels.bigbird.layers.attend
    monkeypatch.setattr(
        samerun.kernels.bigbird.layers, "attend", lambda *inputs: (calls.append(1), function(*inputs))[1]
    )
    return calls


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_it_works_on_this_machine(dtype, size):
    assert is_usable(GPU, dtype, size)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_it_computes_what_the_gathered_blocks_give(precision, training, lengths, attended):
    model = encoder().train(training)
    gathered, quick = copy.deepcopy(model), model
    use_bigbird_attention(gathered, "blocks")
    use_bigbird_attention(quick)
    ids, mask = batch(lengths)
    expected, found = (results(m, ids, mask, lengths, precision) for m in (gathered, quick))
    assert len(attended) == 2  # layers
    assert_close(found, expected, *((1e-4, 1e-3) if precision is None else (0.05, 0.05)))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("length", [705, 1024, 1536, 4096])
def test_it_computes_what_transformers_gives(training, length, attended):
    plain = encoder(1).train(training)
    quick = copy.deepcopy(plain)
    use_bigbird_attention(quick)
    ids, mask = batch((length,))
    expected = results(plain, ids, mask, (length,), None)
    assert_close(results(quick, ids, mask, (length,), None), expected, 1e-4, 1e-3)
    assert attended


def test_checkpointing_and_inference(attended):
    model = encoder().train()
    use_bigbird_attention(model)
    ids, mask = batch((1536, 900))
    expected = results(model, ids, mask, (1536, 900), torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(results(model, ids, mask, (1536, 900), torch.bfloat16), expected, 1e-6, 1e-6)
    with row_lengths((1536, 900)), torch.inference_mode():
        states = model.eval()(input_ids=ids, attention_mask=mask)[0]
    assert states.isfinite().all()
    assert len(attended) == 2 + 4 + 2
