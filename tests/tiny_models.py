"""Small models of the text tasks, batches for them, and a measurement of peak memory."""

import gc
from dataclasses import replace

import numpy as np
import torch
from linear_task import make_plan
from text_tasks import SEARCH, classification, titles
from torch.profiler import ProfilerActivity, profile
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    BigBirdConfig,
    BigBirdModel,
    EncoderDecoderModel,
)  # fmt: skip

from samerun.data.batches import TrainBatches
from samerun.kernels.bigbird import use_bigbird_attention
from samerun.kernels.masks import use_known_masks
from samerun.optimizer import build_optimizer
from samerun.task import Batch, Split
from samerun.text.text import lengths_of, pad_rows
from samerun.text.titles import IGNORED


def sizes(hidden, layers=1, heads=2, inner=32, words=60):
    """The sizes in a BERT's configuration."""
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": inner, "vocab_size": words,
    }  # fmt: skip


def encoder_decoder(given, encoder=None):
    """A decoder with this configuration behind `encoder`, a BERT with the same configuration by default.
    Generates with the ids that `train_tokenizer` gives [CLS], [SEP] and [PAD]."""
    encoder = encoder or BertModel(BertConfig(**given))
    decoder = BertLMHeadModel(BertConfig(**given, is_decoder=True, add_cross_attention=True))
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    for part in (model.config, model.generation_config):
        part.decoder_start_token_id, part.eos_token_id, part.pad_token_id = 2, 3, 0
    return model


def big_bird_titles(given, **sparse):
    """An encoder-decoder whose encoder is a block-sparse BigBird with our attention."""
    model = encoder_decoder(given, BigBirdModel(BigBirdConfig(**given, **sparse)))
    assert use_bigbird_attention(model)
    return model


def collator(lengths, multiple=1, titled=False, window=None):
    """Documents whose tokens are a function of their number, with titles or three labels; with windows of
    `window` tokens."""

    def collate(rows):
        ids = [np.random.default_rng(int(row)).integers(3, 60, size=lengths[row]) for row in rows]
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


# Steps

CLASSIFY = classification(3, np.ones(3), label_smoothing_factor=0.1)
TITLES = titles(replace(SEARCH, start_id=1), label_smoothing_factor=0.1)
# name: task, tokens of the longest row, padding multiple
KINDS = {"padded": (CLASSIFY, 120, 1), "blocks": (TITLES, 1024, 64), "titles": (TITLES, 500, 1)}


def build(kind):
    torch.manual_seed(0)
    given = sizes(128, 2, 2, 256)
    if kind == "padded":
        return BertForSequenceClassification(BertConfig(**given, num_labels=3)).train()
    return (big_bird_titles if kind == "blocks" else encoder_decoder)(given).train()


def batches(kind, rows=32):
    """Twelve optimizer steps of two micro-batches each."""
    task, longest, multiple = KINDS[kind]
    lengths = np.linspace(longest // 4, longest, rows).astype(int)
    plan = make_plan(rows, epochs=3, global_batch_size=8, accumulation=2)
    collate = collator(lengths, multiple, task is TITLES)
    split = Split("rows", collate, rows, lengths=lengths, padding_multiple=multiple)
    return TrainBatches(split, plan, 0, 1, True)


def prepared(run, model, arguments):
    """(the model, its optimizer), as a run trains them."""
    use_known_masks()
    return run.accelerator.prepare(model, build_optimizer(arguments, model, 1e-3, lambda *_: 1.0))


# Memory


def text_batch(rows, width, labels=None):
    """Rows of random ids; all but the first have five less."""
    inputs = {"input_ids": torch.randint(5, 299, (rows, width), generator=torch.Generator().manual_seed(0))}
    inputs["attention_mask"] = torch.ones(rows, width, dtype=torch.int64)
    inputs["attention_mask"][1:, width - 5 :] = 0
    labels = torch.ones(rows, 5) if labels is None else labels
    return Batch(torch.arange(rows), inputs, labels, places=tuple(range(rows)))


def title_batch(rows, width, length):
    titles = torch.randint(5, 299, (rows, length), generator=torch.Generator().manual_seed(1))
    return text_batch(rows, width, titles)


def peak_bytes(work, model):
    """The peak memory of `work`() in bytes, above the memory before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the profiler sees the allocations of its own thread only
    model.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
        # Free the memory within the profile: freed later, it would be subtracted from the next measurement.
        model.zero_grad(set_to_none=True)
        gc.collect()
    torch.set_num_threads(threads)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    nbytes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert len(nbytes) > 20
    return int(np.cumsum(nbytes).max())
