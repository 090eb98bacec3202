"""Small models, batches and a measurement of peak memory for the tests of the memory estimate."""

import gc
from dataclasses import replace

import numpy as np
import torch
from text_tasks import SEARCH, classification, titles
from torch.profiler import ProfilerActivity, profile
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BigBirdConfig,
    BigBirdModel,
    EncoderDecoderModel,
)

from samerun.kernels.bigbird import use_bigbird_attention
from samerun.kernels.padding_free import use_padding_free
from samerun.memory import Layout
from samerun.task import Batch

CLASSIFY = classification(5)
TITLES = titles(replace(SEARCH, start_id=1))
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
}
ALONE = Layout(world_size=1, precision="no", on_gpu=False, accumulation=1, wrapped=False)


def bert(**changes):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**{**SIZES, "num_labels": 5, **changes})).train()
    return model


def big_bird_titles():
    """A block-sparse BigBird encoder of ours with a BERT decoder."""
    torch.manual_seed(0)
    encoder = BigBirdModel(BigBirdConfig(**SIZES, block_size=16, max_position_embeddings=256))
    encoder.pooler = encoder.activation = None
    decoder = BertLMHeadModel(BertConfig(**SIZES, is_decoder=True, add_cross_attention=True))
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.pad_token_id, model.config.decoder_start_token_id = 0, 1
    assert use_bigbird_attention(model)
    return model.train()


def padding_free_bert():
    model = bert()
    assert use_padding_free(model)
    return model


def text_batch(rows, width, labels=None):
    ids = torch.randint(5, 299, (rows, width), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1:, width - 5 :] = 0
    return Batch(
        torch.arange(rows),
        {"input_ids": ids, "attention_mask": mask},
        torch.ones(rows, 5) if labels is None else labels,
        places=tuple(range(rows)),
    )


def ragged_batch(rows, width):
    batch = text_batch(rows, width)
    return replace(batch, lengths=(width, *[width - 5] * (rows - 1)))


def title_batch(rows, width, length):
    return text_batch(
        rows, width, torch.randint(5, 299, (rows, length), generator=torch.Generator().manual_seed(1))
    )


def peak_bytes(work, model):
    """The peak memory of `work`() in bytes, above the memory before."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
        # Free the memory within the profile: freed later, it would be subtracted from the next measurement.
        model.zero_grad(set_to_none=True)
        gc.collect()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert len(sizes) > 20
    return int(np.cumsum(sizes).max())
