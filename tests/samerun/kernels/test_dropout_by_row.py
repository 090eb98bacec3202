"""Dropout by row: a step has the same loss and gradients however its rows are divided, padded or packed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from linear_task import make_plan
from text_tasks import SEARCH, classification, titles
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    BigBirdConfig,
    BigBirdModel,
    DebertaV2Config,
    DistilBertConfig,
    EncoderDecoderModel,
    SegformerConfig,
    SegformerForImageClassification,
    SwinConfig,
    SwinForImageClassification,
)

from samerun.data.batches import TrainBatches
from samerun.kernels.bigbird import use_bigbird_attention
from samerun.kernels.common import current_rows
from samerun.kernels.dropout import dropout_by_row, use_row_drop_path
from samerun.kernels.padding_free import use_padding_free
from samerun.layers import checkpoint_activations
from samerun.models.windows import pool_windows
from samerun.task import Batch, Split
from samerun.text.text import lengths_of, pad_rows
from samerun.text.titles import IGNORED
from samerun.training import seed_step

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": 60, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2, "num_labels": 3,
}  # fmt: skip
LENGTHS = np.array([23, 7, 7, 1, 40, 12, 3, 18, 30, 2, 25])
CLASSIFY, TITLES = classification(3), titles(replace(SEARCH, start_id=1))


def bert(**changes):
    return BertForSequenceClassification(BertConfig(**{**SIZES, **changes}))


def distilbert():
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60, "num_labels": 3}
    config = DistilBertConfig(**sizes, dropout=0.2, attention_dropout=0.2, seq_classif_dropout=0.3)
    return AutoModelForSequenceClassification.from_config(config)


def deberta():
    config = DebertaV2Config(
        **SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=8
    )
    return AutoModelForSequenceClassification.from_config(config)


def big_bird(**changes):
    sparse = {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 128}
    encoder = BigBirdModel(BigBirdConfig(**SIZES, **sparse))
    encoder.pooler = encoder.activation = None
    assert use_bigbird_attention(encoder)
    return encoder_decoder(encoder)


def encoder_decoder(encoder=None):
    encoder = encoder or BertModel(BertConfig(**SIZES), add_pooling_layer=False)
    decoder = BertLMHeadModel(BertConfig(**SIZES, is_decoder=True, add_cross_attention=True))
    return EncoderDecoderModel(encoder=encoder, decoder=decoder)


def bart():
    layers = {
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    sizes = {"vocab_size": 60, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    rates = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.1, "encoder_layerdrop": 0.3}
    return BartForConditionalGeneration(BartConfig(**layers, **sizes, **rates, max_position_embeddings=64))


def lora():
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(r=2, lora_dropout=0.3, target_modules="all-linear"), bert())


def windows():
    return pool_windows(bert(), 8, "max", "right")


def segformer():
    sizes = {
        "hidden_sizes": [8, 16],
        "depths": [2, 1],
        "num_encoder_blocks": 2,
        "num_attention_heads": [1, 2],
    }
    more = {
        "sr_ratios": [2, 1],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
        "num_labels": 3,
    }
    return SegformerForImageClassification(SegformerConfig(**sizes, **more, drop_path_rate=0.4))


def swin():
    sizes = {
        "embed_dim": 8,
        "depths": [2],
        "num_heads": [2],
        "window_size": 4,
        "patch_size": 4,
        "image_size": 32,
    }
    rates = {"drop_path_rate": 0.4, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    return SwinForImageClassification(SwinConfig(**sizes, **rates, num_labels=3))


class Own(nn.Module):
    """A user's network: dropout of channels, functional dropout, torch's own transformer layer, a table of
    positions."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Sequential(
            nn.Conv2d(3, 8, 4, 4), nn.Dropout2d(0.3), nn.GELU(), nn.Dropout(0.1, True)
        )
        self.positions = nn.Parameter(torch.randn(1, 64, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, pixel_values):
        tokens = self.convolution(pixel_values).flatten(2).mT
        tokens = self.layer(tokens + functional.dropout(self.positions, 0.2, self.training))
        return self.head(functional.dropout(tokens.mean(1), training=self.training))


def document(row, length):
    return np.random.default_rng(int(row)).integers(3, 60, size=length)


def text_collator(titled, multiple, window=None):
    """Documents whose tokens are a function of their number; with windows of `window` tokens."""

    def collate(rows):
        ids = [document(row, LENGTHS[row]) for row in rows]
        pieces, most = ids, 1
        if window is not None:
            most = -(-max(map(len, ids)) // window)
            pieces = [row[window * i : window * (i + 1)] for row in ids for i in range(most)]
        inputs = {
            "input_ids": pad_rows(pieces, 0, multiple=multiple),
            "attention_mask": pad_rows([np.ones_like(piece) for piece in pieces], 0, multiple=multiple),
        }
        if window is not None:
            inputs = {name: tensor.unflatten(0, (len(rows), most)) for name, tensor in inputs.items()}
        labels = torch.tensor([[row % 2, row % 3 == 0, 1.0] for row in rows])
        if titled:
            labels = pad_rows([row[: 3 + len(row) % 5] for row in ids], IGNORED)
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels, lengths_of(ids, "right"))

    return collate


def images(rows):
    pixels = [torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(int(row))) for row in rows]
    labels = torch.tensor([[row % 2, row % 3 == 0, 1.0] for row in rows])
    return Batch(torch.as_tensor(rows, dtype=torch.int64), {"pixel_values": torch.stack(pixels)}, labels)


def image_loss(model, batch):
    logits = model(**batch.inputs)
    return (getattr(logits, "logits", logits) - batch.labels)[batch.is_real].square().sum()


# (model, loss, collate with a padding multiple)
TEXTS = (CLASSIFY.loss_sum, lambda multiple: text_collator(False, multiple))
DECODERS = (TITLES.loss_sum, lambda multiple: text_collator(True, multiple))
IMAGES = (image_loss, lambda _: images)
MODELS = {
    "BERT": (bert, *TEXTS),
    "eager BERT": (lambda: bert(attn_implementation="eager"), *TEXTS),
    "DistilBERT": (distilbert, *TEXTS),
    "DeBERTa": (deberta, *TEXTS),
    "LoRA": (lora, *TEXTS),
    "windows": (windows, CLASSIFY.loss_sum, lambda multiple: text_collator(False, 1, 8)),
    "titles": (encoder_decoder, *DECODERS),
    "BigBird titles": (big_bird, TITLES.loss_sum, lambda multiple: text_collator(True, 4 * multiple)),
    "BART": (bart, *DECODERS),
    "SegFormer": (segformer, *IMAGES),
    "Swin": (swin, *IMAGES),
    "own": (Own, *IMAGES),
}
PADDING_FREE = ("BERT", "DistilBERT", "LoRA", "windows", "titles")


def step_of(name, world_size=1, accumulation=1, max_tokens=None, multiple=1, checkpointing=False, free=False):
    """(loss, gradients) of the first step, whose processes run one after the other. `free`: without
    padding."""
    make, loss_sum, collator = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    use_row_drop_path(model)
    if free:
        assert use_padding_free(model)
    if checkpointing:
        checkpoint_activations(model, dropout_by_row=True)
    plan = make_plan(len(LENGTHS), global_batch_size=len(LENGTHS))
    shape = replace(plan.batch, world_size=world_size, accumulation=accumulation, max_tokens=max_tokens)
    split = Split("rows", collator(multiple), len(LENGTHS), lengths=LENGTHS)
    total = 0.0
    for rank in range(world_size):
        steps = TrainBatches(split, replace(plan, batch=shape), rank, 1, True, free, dropout_by_row=True)
        for batch in steps[0]:
            seed_step(7, 0, rank, True)
            with dropout_by_row(batch.lengths, batch.places):
                loss = loss_sum(model, batch)
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_same(found, expected, tolerance=2e-5):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    largest = max(gradient.abs().max() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=0, atol=float(largest) * tolerance, msg=name
        )


DIVISIONS = {
    "micro-batches": {"accumulation": 4},
    "by tokens": {"max_tokens": 45},
    "three processes": {"world_size": 3, "accumulation": 2},
    "wider padding": {"multiple": 16, "world_size": 2},
    "checkpointing": {"checkpointing": True, "accumulation": 3},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_does_not_depend_on_how_its_rows_are_divided(name):
    expected = step_of(name)
    for division in DIVISIONS.values():
        if not division.get("checkpointing") or name != "own":
            check_same(step_of(name, **division), expected)
    if name in PADDING_FREE:
        check_same(step_of(name, free=True), expected)
        check_same(step_of(name, free=True, max_tokens=45, checkpointing=True), expected)


def test_each_window_of_a_document_has_a_place_of_its_own():
    model, seen = windows().train(), []
    model.base_model.register_forward_pre_hook(lambda *_: seen.append(current_rows().places))
    rows = np.arange(3)
    batch = text_collator(False, 1, 8)(rows)
    with dropout_by_row(batch.lengths, (5, 6, 7)):
        CLASSIFY.loss_sum(model, batch)
    (places,) = seen
    assert len(places) == sum(-(-LENGTHS[row] // 8) for row in rows) == len(set(places)) > 3
