"""Padding-free batches against padded ones on a GPU, through each kernel that may be chosen there."""

import copy

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import samerun.kernels.padding_free.attention
from samerun.kernels import row_lengths
from samerun.kernels.padding_free.encoders import use_padding_free

GPU = torch.device("cuda")
LENGTHS = (300, 17, 1, 512, 64, 64, 129)


def model(dropout=0.0):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 90,
    }
    dropouts = {
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "initializer_range": 0.1,
    }
    return BertForSequenceClassification(BertConfig(**sizes, **dropouts, num_labels=3)).train().to(GPU)


def batch():
    ids = torch.randint(3, 90, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([torch.arange(max(LENGTHS)) < n for n in LENGTHS]).long()
    return {"input_ids": ids.to(GPU), "attention_mask": mask.to(GPU)}


@pytest.fixture
def kernels(monkeypatch):
    """The names of the functions that attended, in order."""
    called = []

    def watch(name):
        function = getattr(samerun.kernels.padding_free.attention, name)
        monkeypatch.setattr(
            samerun.kernels.padding_free.attention,
            name,
            lambda *inputs: (called.append(name), function(*inputs))[1],
        )

    for name in ("flash", "jagged", "by_length"):
        watch(name)
    return called


def gradients_of(plain, inputs, precision, lengths):
    plain.zero_grad()
    with (
        row_lengths.row_lengths(lengths),
        torch.autocast("cuda", precision or torch.bfloat16, enabled=precision is not None),
    ):
        logits = plain(**inputs).logits.float()
    (logits * torch.arange(1.0, 1 + logits.numel(), device=GPU).view_as(logits).sin()).sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in plain.parameters())]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("precision", "kernel", "tolerance"),
    [(None, "jagged", 1e-4), (torch.bfloat16, "flash", 0.05), (torch.float16, "flash", 0.01)],
)
def test_logits_and_gradients_are_those_of_the_padded_batch(precision, kernel, tolerance, kernels):
    plain = model()
    twin = copy.deepcopy(plain)
    assert use_padding_free(twin)
    expected = gradients_of(plain, batch(), precision, None)
    found = gradients_of(twin, batch(), precision, LENGTHS)
    if precision is not None and torch.cuda.get_device_capability() < (8, 0):
        kernel = "jagged"
    assert kernels == [kernel] * 2
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm().clamp(min=1)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_dropout_is_a_function_of_the_seed_and_has_no_bias(precision, kernels):
    with_dropout = model(0.1)
    use_padding_free(with_dropout)

    def logits(seed):
        torch.manual_seed(seed)
        return gradients_of(with_dropout, batch(), precision, LENGTHS)[0]

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
    assert set(kernels) == {"jagged"}  # varlen_attn has no dropout
    mean = torch.stack([logits(seed) for seed in range(40)]).mean(dim=0)
    expected = torch.stack([gradients_of(with_dropout, batch(), precision, None)[0] for _ in range(40)]).mean(
        dim=0
    )
    assert (mean - expected).abs().max() < 0.5 * expected.abs().max().clamp(min=0.5)
