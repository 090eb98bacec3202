"""Dropout by row: a step has the same loss and gradients however its rows are divided or padded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from linear_task import make_plan
from text_tasks import SEARCH, classification, titles
from tiny_models import big_bird_titles, collator, encoder_decoder, sizes
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
)

from samerun.data.batches import TrainBatches
from samerun.kernels.common import current_rows
from samerun.kernels.dropout import dropout_by_row, use_row_modules
from samerun.kernels.last_layer import use_first_token
from samerun.layers import checkpoint_activations
from samerun.task import Batch, Split
from samerun.text.long_documents import LongDocuments
from samerun.training import seed_step

RATES = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2, "num_labels": 3}
SIZES = sizes(32, 2, 4, 48) | RATES
LENGTHS = np.array([23, 7, 7, 1, 40, 12, 3, 18, 30, 2, 25])
CLASSIFY, TITLES = classification(3), titles(replace(SEARCH, start_id=1))


def classifier(model_type, **given):
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model_type, **given))


def bert(**changes):
    return classifier("bert", **SIZES | changes)


def distilbert():
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60, "num_labels": 3}
    rates = {"dropout": 0.2, "attention_dropout": 0.2, "seq_classif_dropout": 0.3}
    return classifier("distilbert", **sizes, **rates)


def deberta():
    """As version 3, with weights that make the relative positions count."""
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
    large = {"norm_rel_ebd": "layer_norm", "initializer_range": 0.3}
    return classifier("deberta-v2", **SIZES, **relative, **large)


def big_bird():
    return big_bird_titles(SIZES, block_size=4, num_random_blocks=1, max_position_embeddings=128)


def bart():
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    sizes = {"vocab_size": 60, "d_model": 32, "max_position_embeddings": 64}
    rates = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.1, "encoder_layerdrop": 0.3}
    return BartForConditionalGeneration(BartConfig(**encoder, **decoder, **sizes, **rates))


def lora():
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(r=2, lora_dropout=0.3, target_modules="all-linear"), bert())


def windows():
    return LongDocuments("windows", 8).prepare(bert(), "right")


def segformer():
    sizes = {"hidden_sizes": [8, 16], "depths": [2, 1], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    more = {"sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "num_encoder_blocks": 2}
    config = AutoConfig.for_model("segformer", **sizes, **more, num_labels=3, drop_path_rate=0.4)
    return AutoModelForImageClassification.from_config(config)


def swin():
    sizes = {"embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4, "patch_size": 4}
    config = AutoConfig.for_model("swin", **sizes, **RATES, image_size=32, drop_path_rate=0.4)
    return AutoModelForImageClassification.from_config(config)


class Own(nn.Module):
    """A user's network: dropout of channels, functional dropout, torch's transformer layer, positions."""

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


def images(rows):
    pixels = [torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(int(row))) for row in rows]
    labels = torch.tensor([[row % 2, row % 3 == 0, 1.0] for row in rows])
    return Batch(torch.as_tensor(rows, dtype=torch.int64), {"pixel_values": torch.stack(pixels)}, labels)


def image_loss(model, batch):
    logits = model(**batch.inputs)
    return (getattr(logits, "logits", logits) - batch.labels)[batch.is_real].square().sum()


# (model, loss, collate with a padding multiple)
TEXTS = (CLASSIFY.loss_sum, lambda multiple: collator(LENGTHS, multiple))
DECODERS = (TITLES.loss_sum, lambda multiple: collator(LENGTHS, multiple, True))
IMAGES = (image_loss, lambda _: images)
MODELS = {
    "BERT": (bert, *TEXTS),
    "eager BERT": (lambda: bert(attn_implementation="eager"), *TEXTS),
    "DistilBERT": (distilbert, *TEXTS),
    "DeBERTa": (deberta, *TEXTS),
    "LoRA": (lora, *TEXTS),
    "windows": (windows, CLASSIFY.loss_sum, lambda multiple: collator(LENGTHS, window=8)),
    "titles": (lambda: encoder_decoder(SIZES), *DECODERS),
    "BigBird titles": (big_bird, TITLES.loss_sum, lambda multiple: collator(LENGTHS, 4 * multiple, True)),
    "BART": (bart, *DECODERS),
    "SegFormer": (segformer, *IMAGES),
    "Swin": (swin, *IMAGES),
    "own": (Own, *IMAGES),
}


def step_of(
    name, world_size=1, accumulation=1, max_tokens=None, multiple=1, checkpointing=False, change=None
):
    """(loss, gradients) of the first step, whose processes run one after the other."""
    make, loss_sum, collate = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    if change is not None:
        change(model)
    use_row_modules(model)
    if checkpointing:
        checkpoint_activations(model, dropout_by_row=True)
    plan = make_plan(len(LENGTHS), global_batch_size=len(LENGTHS))
    shape = replace(plan.batch, world_size=world_size, accumulation=accumulation, max_tokens=max_tokens)
    split = Split("rows", collate(multiple), len(LENGTHS), lengths=LENGTHS)
    total = 0.0
    for rank in range(world_size):
        steps = TrainBatches(split, replace(plan, batch=shape), rank, 1, True, by_row=True)
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
    near = {"rtol": 0, "atol": float(largest) * tolerance}
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, **near, msg=name)


DIVISIONS = {
    "micro-batches": {"accumulation": 4},
    "by tokens": {"max_tokens": 45},
    "three processes, wider padding": {"world_size": 3, "accumulation": 2, "multiple": 16},
    "checkpointing": {"checkpointing": True, "accumulation": 3},
}
AT_ONCE = {"max_tokens": 45, "multiple": 16, "world_size": 2, "checkpointing": True}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_does_not_depend_on_how_its_rows_are_divided(name):
    expected = step_of(name)
    divisions = DIVISIONS.values() if name == "BERT" else [DIVISIONS["micro-batches"], AT_ONCE]
    for division in divisions:
        check_same(step_of(name, **division | ({"checkpointing": False} if name == "own" else {})), expected)


@pytest.mark.parametrize("name", ["BERT", "DistilBERT", "LoRA"])
def test_a_last_layer_for_the_first_token_drops_the_same_and_has_the_same_gradients(name):
    check_same(step_of(name, **AT_ONCE, change=use_first_token), step_of(name))


def test_each_window_of_a_document_has_a_place_of_its_own():
    model, seen = windows().train(), []
    model.base_model.register_forward_pre_hook(lambda *_: seen.append(current_rows().places))
    rows = np.arange(3)
    batch = collator(LENGTHS, window=8)(rows)
    with dropout_by_row(batch.lengths, (5, 6, 7)):
        CLASSIFY.loss_sum(model, batch)
    (places,) = seen
    assert len(places) == sum(-(-LENGTHS[row] // 8) for row in rows) == len(set(places)) > 3
