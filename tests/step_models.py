"""Small models and batches of the text tasks, for tests of single steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import transformers.masking_utils
from linear_task import make_plan
from text_tasks import SEARCH, classification, titles
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    BigBirdConfig,
    BigBirdModel,
    EncoderDecoderModel,
)

from samerun.data.batches import TrainBatches
from samerun.kernels.bigbird import use_bigbird_attention
from samerun.kernels.padding_free import use_padding_free
from samerun.task import Batch, Split
from samerun.text.text import lengths_of, pad_rows
from samerun.text.titles import IGNORED

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 90,
}
CLASSIFY = classification(5, np.ones(5), label_smoothing_factor=0.1)
TITLES = titles(replace(SEARCH, start_id=1), label_smoothing_factor=0.1)
# name: task, tokens of the longest row, padding multiple
KINDS = {
    "padded": (CLASSIFY, 120, 1),
    "padding_free": (CLASSIFY, 120, 1),
    "blocks": (TITLES, 1024, 64),
    "titles": (TITLES, 500, 1),
    "padding_free_titles": (TITLES, 500, 1),
}


def unasked_masks(monkeypatch):
    """Keeps transformers' masks from asking whether a batch has padding."""
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        monkeypatch.setattr(transformers.masking_utils, name, lambda *_, **__: False)


def build(kind):
    torch.manual_seed(0)
    if KINDS[kind][0] is CLASSIFY:
        model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=5))
    else:
        encoder = BertModel(BertConfig(**SIZES)) if kind != "blocks" else BigBirdModel(BigBirdConfig(**SIZES))
        encoder.pooler = encoder.activation = None
        decoder = BertLMHeadModel(BertConfig(**SIZES, is_decoder=True, add_cross_attention=True))
        model = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    if kind.startswith("padding_free"):
        assert use_padding_free(model)
    if kind == "blocks":
        assert use_bigbird_attention(model)
    return model.train()


def batches(kind, rows=32):
    """Twelve optimizer steps of two micro-batches each."""
    task, longest, multiple = KINDS[kind]
    lengths = np.linspace(longest // 4, longest, rows).astype(int)
    plan = make_plan(rows, epochs=3, global_batch_size=8, accumulation=2)
    split = Split(
        "rows", collator(lengths, multiple, task is TITLES), rows, lengths=lengths, padding_multiple=multiple
    )
    return TrainBatches(split, plan, 0, 1, True)


def collator(lengths, multiple, titled):
    def collate(rows):
        ids = [np.random.default_rng(int(row)).integers(3, 90, size=lengths[row]) for row in rows]
        inputs = {
            "input_ids": pad_rows(ids, 0, multiple=multiple),
            "attention_mask": pad_rows([row * 0 + 1 for row in ids], 0, multiple=multiple),
        }
        labels = (
            pad_rows([row[: 3 + len(row) % 5] for row in ids], IGNORED)
            if titled
            else torch.ones(len(rows), 5)
        )
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels, lengths_of(ids, "right"))

    return collate
