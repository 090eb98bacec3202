"""Encoder-decoders are built so that every parameter learns and plain transformers can load them."""

from types import SimpleNamespace

import numpy as np
import pytest
import titlegen
import torch
from text_tasks import SEARCH
from tiny_models import sizes
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    BertModel,
    BigBirdConfig,
    EncoderDecoderModel,
    ModernBertConfig,
)

from samerun.errors import InputError
from samerun.export import export_model
from samerun.models.encoder_decoder import (
    build_title_model,
    load_title_config,
    set_output_bias,
    special_ids,
)
from samerun.text.titles import IGNORED, USAGE, plain_model, teacher_forcing
from samerun.text.tokenizer import train_tokenizer

SIZES = sizes(16, layers=4, words=200)


def asked(**changes):
    return titlegen.Arguments(**{"from_scratch": True, "decoder_layers": 2, "max_title_length": 8, **changes})


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a title of a document", "another document with a title", "深度学习的标题"], 128)


def test_a_pretrained_encoder_warms_its_decoder_up(tmp_path, tokenizer):
    torch.manual_seed(0)
    encoder = BertModel(BertConfig(**SIZES | {"vocab_size": len(tokenizer)}))
    encoder.save_pretrained(tmp_path / "encoder")
    arguments = asked(from_scratch=False, model_name_or_path=str(tmp_path / "encoder"))
    model = build_title_model(arguments, load_title_config(arguments), tokenizer)
    theirs, ours = encoder.encoder.layer, model.decoder.bert.encoder.layer
    assert torch.equal(ours[0].attention.self.query.weight, theirs[0].attention.self.query.weight)
    # The last of two is the last of four.
    assert torch.equal(ours[1].output.dense.weight, theirs[3].output.dense.weight)
    words = model.decoder.bert.embeddings.word_embeddings.weight
    assert torch.equal(words[: len(tokenizer)], encoder.embeddings.word_embeddings.weight)
    assert hasattr(ours[0], "crossattention")


def test_a_new_decoder_starts_with_the_encoders_embeddings_and_the_frequencies_of_tokens(tokenizer):
    model = build_title_model(asked(), BertConfig(**SIZES), tokenizer)
    ours, theirs = model.decoder.get_input_embeddings().weight, model.encoder.get_input_embeddings().weight
    assert torch.equal(ours, theirs)
    assert ours is not theirs
    assert model.decoder.get_output_embeddings().weight is ours
    set_output_bias(model, np.array([7, 7, 9]))
    bias = model.decoder.get_output_embeddings().bias
    chances = bias.exp()
    assert chances.sum().item() == pytest.approx(1)
    assert (chances[7] / chances[9]).item() == pytest.approx(2.5 / 1.5)
    assert (chances[9] / chances[8]).item() == pytest.approx(3.0)


def test_a_tokenizer_without_tokens_that_begin_and_end_a_title_is_refused():
    bare = SimpleNamespace(bos_token_id=None, cls_token_id=None, eos_token_id=None, sep_token_id=None)
    with pytest.raises(InputError, match="neither bos and eos"):
        special_ids(BertConfig(), bare)


class BothPairs:
    """As BigBird's, which puts cls and sep around texts and also has bos and eos."""

    bos_token_id, cls_token_id, eos_token_id, sep_token_id = 1, 65, 2, 66

    def __call__(self, text):
        return {"input_ids": [65, 66]}


def test_a_new_decoders_titles_begin_and_end_as_the_tokenizers_texts():
    assert special_ids(BertConfig(), BothPairs()) == (65, 66)
    assert special_ids(BartConfig(decoder_start_token_id=None), BothPairs()) == (1, 2)


@pytest.mark.parametrize("kind", [BertConfig, BigBirdConfig, ModernBertConfig])
def test_all_but_a_pooler_learns_and_is_exported_and_the_cards_code_runs(
    kind, tokenizer, tmp_path, monkeypatch, capsys
):
    config = kind(**SIZES)
    if kind is BigBirdConfig:
        config.attention_type = "original_full"
    model = build_title_model(asked(), config, tokenizer)
    ids = torch.tensor([[2, 7, 8, 9, 3]])
    labels = torch.tensor([[10, 11, 3, IGNORED]])
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **teacher_forcing(labels, SEARCH))
    output.logits.logsumexp(-1).sum().backward()
    assert all("encoder.pooler" in name for name, p in model.named_parameters() if p.grad is None)
    assert len(model.decoder.bert.encoder.layer) == 2
    folder, plain = tmp_path / "best", plain_model(model, SEARCH)
    export_model(folder, plain, model.state_dict(), lambda folder: None, tokenizer, 16)
    loaded, loading = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert (loading["missing_keys"], loading["unexpected_keys"]) == (set(), set())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    monkeypatch.chdir(tmp_path)
    ids = torch.tensor([tokenizer("深度学习的 a title")["input_ids"]])
    monkeypatch.setattr(EncoderDecoderModel, "generate", lambda *_, **__: ids)
    capsys.readouterr()
    exec(USAGE, {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("深度学习的 a")
