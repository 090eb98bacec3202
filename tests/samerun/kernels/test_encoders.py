"""Padding-free batches against padded ones: the same model, twice."""

import copy
import pickle

import pytest
import torch
from tiny_models import encoder_decoder, sizes
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    ModernBertConfig,
)

from samerun.errors import InputError
from samerun.kernels import common as row_lengths
from samerun.kernels.enable import SUPPORTED, check_padding_free
from samerun.kernels.padding_free import NAME, use_padding_free

LENGTHS = (23, 7, 7, 1, 40, 12)
SIZES = sizes(32, 2, 4, 48)
WITHOUT_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}


def classifier(kind="bert", **changes):
    torch.manual_seed(0)
    known = AutoConfig.for_model(kind).to_dict()
    wanted = {**SIZES, **DISTIL, **WITHOUT_DROPOUT, "initializer_range": 0.3, "seq_classif_dropout": 0.0}
    config = AutoConfig.for_model(
        kind, num_labels=3, **{**{k: v for k, v in wanted.items() if k in known}, **changes}
    )
    return AutoModelForSequenceClassification.from_config(config)


def padding_free_twin(model):
    twin = copy.deepcopy(model)
    assert use_padding_free(twin)
    return twin


def batch(rows=LENGTHS, width=None):
    """Random ids in the padding too: nobody may look at them."""
    width = width or max(rows)
    ids = torch.randint(3, 60, (len(rows), width), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([torch.arange(width) < n for n in rows]).long()
    ids[mask == 0] = 1  # RoBERTa counts positions by where its padding id is not
    return {"input_ids": ids, "attention_mask": mask}


def tokens_seen(model):
    """How many tokens each call of the first layer's feed-forward net saw."""
    seen = []
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 48]
    layers[0].register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[:-1].numel()))
    return seen


def check_same(model, packed, inputs, rows=LENGTHS):
    """Logits to 1e-5, gradients of every parameter to 1e-4 of its largest, or of 1."""
    model.zero_grad()
    expected = model(**inputs).logits
    with row_lengths.row_lengths(rows):
        found = packed(**inputs).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for logits in (found, expected):
        (logits * torch.arange(1.0, 1 + logits.numel()).view_as(logits).sin()).sum().backward()
    for (name, ours), theirs in zip(packed.named_parameters(), model.parameters(), strict=True):
        scale = theirs.grad.abs().max().clamp(min=1)
        torch.testing.assert_close(ours.grad / scale, theirs.grad / scale, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_logits_and_gradients_are_those_of_the_padded_batch(kind):
    model = classifier(kind)
    twin = padding_free_twin(model)
    seen = tokens_seen(twin)
    check_same(model.train(), twin.train(), batch())
    assert seen == [sum(LENGTHS)]


@pytest.mark.parametrize("rows", [(9,), (5, 5, 5), (1, 30), (30, 1), (2, 1, 2, 1)])
def test_one_row_equal_rows_and_wider_padding(rows):
    model = classifier()
    check_same(model, padding_free_twin(model), batch(rows), rows)
    check_same(model, padding_free_twin(model), batch(rows, 41), rows)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_bit(reentrant):
    found = []
    for checkpointing in (False, True):
        model = padding_free_twin(
            classifier(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
        ).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(3)
        with row_lengths.row_lengths(LENGTHS):
            loss = model(**batch()).logits.square().sum()
        loss.backward()  # where nobody knows the lengths any more
        found.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_autocast_computes_in_bf16_and_keeps_fp32_gradients():
    model = classifier(initializer_range=0.1).train()
    twin = padding_free_twin(model)
    expected = model(**batch()).logits
    with torch.autocast("cpu", torch.bfloat16), row_lengths.row_lengths(LENGTHS):
        logits = twin(**batch()).logits
    logits.float().sum().backward()
    assert 0 < (logits - expected).abs().max() < 0.2
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in twin.parameters())


def test_without_lengths_the_batch_is_padded_as_ever():
    model = classifier()
    twin = padding_free_twin(model)
    seen = tokens_seen(twin)
    # Nobody said; another batch's; more tokens than there are places.
    for known in (None, LENGTHS[1:], (*LENGTHS[1:], 41)):
        with row_lengths.row_lengths(known):
            torch.testing.assert_close(twin(**batch()).logits, model(**batch()).logits, atol=1e-5, rtol=0)
    assert seen == [len(LENGTHS) * max(LENGTHS)] * 3
    with pytest.raises(ZeroDivisionError), row_lengths.row_lengths(LENGTHS):
        1 / 0  # noqa: B018
    assert row_lengths.current_row_lengths(len(LENGTHS), max(LENGTHS)) is None
    # A hole, which lengths cannot describe, is padded too.
    holed = batch()
    holed["attention_mask"][4, 5:9] = 0
    torch.testing.assert_close(twin(**holed).logits, model(**holed).logits, atol=1e-5, rtol=0)


def test_a_batch_without_padding_is_left_as_it_is():
    model = classifier()
    with row_lengths.row_lengths((9, 9)):
        ours = padding_free_twin(model)(**batch((9, 9))).logits
    torch.testing.assert_close(ours, model(**batch((9, 9))).logits, atol=1e-6, rtol=0)


def test_an_encoder_decoder_has_a_padding_free_encoder_and_generates_the_same():
    torch.manual_seed(0)
    model = encoder_decoder(SIZES | WITHOUT_DROPOUT | {"initializer_range": 0.3})
    for holder in (model.config, model.generation_config):
        holder.decoder_start_token_id, holder.pad_token_id, holder.eos_token_id = 1, 0, 2
    twin = padding_free_twin(model)
    seen = tokens_seen(twin.encoder)
    titles = {"decoder_input_ids": torch.full((len(LENGTHS), 4), 7)}
    check_same(model.train(), twin.train(), {**batch(), **titles})
    with row_lengths.row_lengths(LENGTHS):
        ours = twin.eval().generate(**batch(), max_new_tokens=5, num_beams=3)
    assert torch.equal(ours, model.eval().generate(**batch(), max_new_tokens=5, num_beams=3))
    assert seen == [sum(LENGTHS)] * 2
    assert twin.decoder.config._attn_implementation != NAME


def test_what_is_saved_is_plain_transformers(tmp_path):
    model = classifier()
    twin = padding_free_twin(model)
    assert use_padding_free(twin)  # a second time changes nothing
    assert list(twin.state_dict()) == list(model.state_dict())
    twin.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    copied = pickle.loads(pickle.dumps(twin))
    for other in (again, copied):
        with row_lengths.row_lengths(LENGTHS):
            torch.testing.assert_close(other(**batch()).logits, model(**batch()).logits, atol=1e-5, rtol=0)


def test_which_runs_can():
    def check(config, device_type="cpu", side="right", kernels="auto"):
        check_padding_free(kernels=kernels, config=config, device_type=device_type, padding_side=side)

    bert = BertConfig()
    check(bert)
    for refused, message in (
        (
            {"config": bert, "device_type": "cuda"},
            "it is for CPUs, and this run computes on cuda; leave it out",
        ),
        ({"config": bert, "side": "left"}, "before the text"),
        ({"config": bert, "kernels": "reference"}, "--kernels reference"),
        ({"config": BertConfig(chunk_size_feed_forward=4)}, "chunk_size_feed_forward"),
        ({"config": ModernBertConfig()}, "a modernbert model cannot: only bert"),
    ):
        with pytest.raises(InputError, match=message):
            check(**refused)
    assert not use_padding_free(
        AutoModelForSequenceClassification.from_config(ModernBertConfig(**SIZES, pad_token_id=0))
    )
