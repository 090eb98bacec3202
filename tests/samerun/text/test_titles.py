"""Beam search settings (--generation_config: what is passed on, what is refused), and figures."""

import dataclasses
import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from text_tasks import SEARCH, searching
from tiny_models import encoder_decoder, sizes
from titlegen import Arguments
from transformers import AutoTokenizer

from samerun.errors import InputError
from samerun.reports.figures import as_image
from samerun.text import arguments
from samerun.text.titles import (
    SETTINGS,
    model_card,
    plain_model,
    read_generation_config,
    report_content,
    with_search_defaults,
)

EACH = {
    "repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
    "exponential_decay_length_penalty": [2, 1.5],
    "bad_words_ids": [[5], [6, 7]],
    "sequence_bias": [[[8], 2.0]],
    "suppress_tokens": [9],
    "begin_suppress_tokens": [10],
}


@pytest.fixture
def read(tmp_path, bert_folder):
    def write(content):
        path = tmp_path / "search.json"
        path.write_text(json.dumps(content))
        return read_generation_config(str(path), AutoTokenizer.from_pretrained(bert_folder))

    return write


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = encoder_decoder(sizes(16, words=30)).eval()
    model.generation_config.forced_eos_token_id = 3  # as BART's and PEGASUS'
    model.generation_config.max_new_tokens = 2  # which --max_title_length replaces
    return model


def test_every_setting_is_passed_on_and_stored(read, model, tmp_path):
    assert set(EACH) == set(SETTINGS)
    further = read(EACH | {"transformers_version": "5.0"})
    assert further == EACH
    search = searching(further, num_beams=2, max_title_length=6)
    inputs = {"input_ids": torch.randint(4, 30, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.long)}
    found = search.search(model, inputs, None)[0][:, 0]
    assert not torch.isin(found, torch.tensor([5, 9])).any()

    plain_model(model, search).generation_config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: stored[name] for name in EACH} == EACH
    model.generation_config = plain_model(model, search).generation_config
    with torch.no_grad():
        alone = model.generate(**inputs, do_sample=False)
    assert torch.equal(alone, found[:, : alone.shape[1]])
    # Trained on without the file: the model's own settings are kept.
    kept = plain_model(model, SEARCH).generation_config
    assert (kept.suppress_tokens, kept.forced_eos_token_id) == ([9], 3)
    for name in EACH:
        setattr(model.generation_config, name, None)
    without = searching(num_beams=2, max_title_length=6).search(model, inputs, None)[0][:, 0]
    assert not torch.equal(found, without)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"num_beams": 4}, "num_beams is an argument: give --num_beams and take it out of the file"),
        ({"max_new_tokens": 4}, "max_new_tokens is an argument: give --max_title_length"),
        ({"do_sample": True}, "do_sample is not supported .* supported are repetition_penalty, "),
        ({"repetition_penalti": 1.2}, "penalti is not supported .*; did you mean repetition_penalty"),
        ({"repetition_penalty": "high"}, "transformers rejects repetition_penalty 'high'"),
        ({"repetition_penalty": -1.0}, "transformers rejects repetition_penalty -1.0"),
        ({"suppress_tokens": 5}, "transformers rejects suppress_tokens 5"),
        (
            {"bad_words_ids": [[100000]]},
            r"transformers rejects bad_words_ids \[\[100000\]\] .*the tokenizer has \d+ tok",
        ),
    ],
)
def test_what_is_refused(read, content, said):
    with pytest.raises(InputError, match=said):
        read(content)


@pytest.mark.parametrize(("train", "expected"), [(False, (2, 1.5, 0, 2, 16)), (True, (4, 1.0, 0, 0, 64))])
def test_an_exported_model_is_searched_as_it_was_trained(train, expected, tmp_path):
    stored = {"num_beams": 2, "length_penalty": 1.5, "min_length": 3, "max_length": 18}  # with start and end
    cached = tmp_path / "models--me--titles"  # of the hub, after a download
    for file, text in (("refs/main", "1"), ("snapshots/1/generation_config.json", json.dumps(stored))):
        (cached / file).parent.mkdir(parents=True)
        (cached / file).write_text(text)
    given = {"cache_dir": str(tmp_path), "do_train": train, "do_eval": True}
    for name in ("me/titles", str(cached / "snapshots" / "1")):
        asked = Arguments(model_name_or_path=name, **given)
        found = with_search_defaults(asked)
        assert tuple(getattr(found, name) for name in arguments.SEARCH) == expected
    assert with_search_defaults(dataclasses.replace(asked, num_beams=3)).num_beams == 3
    if not train:
        stored["max_new_tokens"] = 10  # with the end token
        (cached / "snapshots/1/generation_config.json").write_text(json.dumps(stored))
        assert with_search_defaults(asked).max_title_length == 9
        with pytest.raises(InputError, match="--min_title_length 2 is more than --max_title_length 1"):
            with_search_defaults(dataclasses.replace(asked, max_title_length=1))


def test_the_cards_code_of_a_led_has_its_global_attention(tmp_path, monkeypatch):
    (tmp_path / "metrics.json").write_text("{}")
    code = model_card(tmp_path, "", True, []).usage
    ids, given = torch.tensor([[7, 8, 9]]), {}
    tokenizer, model = MagicMock(), MagicMock()
    tokenizer.return_value = SimpleNamespace(input_ids=ids, attention_mask=torch.ones_like(ids))
    model.generate = lambda ids, **inputs: given.update(inputs) or ids
    tokenizer.decode.return_value = "a title"
    for kind, made in (("Tokenizer", tokenizer), ("ModelForSeq2SeqLM", model)):
        monkeypatch.setattr(f"transformers.Auto{kind}.from_pretrained", lambda _, made=made: made)
    exec(code, {})
    assert given["global_attention_mask"].tolist() == [[1, 0, 0]]


def test_titles_have_figures_and_examples():
    lengths = np.array([3, 4, 5]), np.array([3, 3, 6]), np.array([10, 50, 90])
    found = report_content(
        ["a b", "c", "x y"], ["a b", "d", "x z"], lengths, ["one", "two", "three"], "default"
    )
    assert [as_image(figure).shape[2] for figure in found.figures.values()] == [3, 3]
    assert found.sections[0].rows[0] == ["0.000", "c", "d", "two", "0.000", "two"]
    assert found.sections[0].rows[-1] == ["1.000", "a b", "a b", "one", "0.000", "one"]
