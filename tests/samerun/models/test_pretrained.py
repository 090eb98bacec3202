import json
import shutil

import pytest
import torch
from damage import flip
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    PegasusConfig,
    PegasusForConditionalGeneration,
)

from samerun.errors import InputError
from samerun.models import pretrained
from samerun.models.pretrained import (
    explain_failed_load,
    labels_of,
    load_config,
    load_model,
    load_model_and_new_names,
)


@pytest.fixture
def folder(bert_folder, tmp_path):
    """A copy of the model that a test may damage."""
    return shutil.copytree(bert_folder, tmp_path / "model")


def load(arguments, folder, **given):
    asked = arguments(model_name_or_path=str(folder), **given)
    return load_model(AutoModelForSequenceClassification, asked, load_config(asked))


def test_a_configuration_of_its_own_wins(arguments, folder, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({**json.loads((folder / "config.json").read_text()), "hidden_size": 24}))
    asked = arguments(model_name_or_path=str(folder), config_name=str(path))
    assert load_config(asked).hidden_size == 24
    assert load_config(asked, hidden_size=32).hidden_size == 32


def test_positions_that_are_computed_need_not_be_in_the_file(arguments, tmp_path):
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"vocab_size": 60, "d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    model = PegasusForConditionalGeneration(PegasusConfig(**sizes, max_position_embeddings=16))
    kept = {name: weight for name, weight in model.state_dict().items() if "embed_positions" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    asked = arguments(model_name_or_path=str(tmp_path))
    found, new = load_model_and_new_names(AutoModelForSeq2SeqLM, asked, load_config(asked))
    assert not new
    for name, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight)


def test_labels_of_one_name_are_told_apart():
    assert labels_of(BertConfig(id2label={0: "crane", 1: "crane", 2: "dog"})) == [
        "crane (0)",
        "crane (1)",
        "dog",
    ]


def test_half_precision_weights_are_trained_in_full(arguments, folder):
    load(arguments, folder).bfloat16().save_pretrained(folder)
    assert {tensor.dtype for tensor in load(arguments, folder).state_dict().values()} == {torch.float32}


def test_from_scratch_is_decided_by_the_seed_and_not_by_the_folders_weights(arguments, folder):
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(load(arguments, folder, from_scratch=True).bert.embeddings.word_embeddings.weight)
    pretrained = load(arguments, folder).bert.embeddings.word_embeddings.weight
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])
    assert not torch.equal(models[0], pretrained)
    (folder / "model.safetensors").unlink()
    load(arguments, folder, from_scratch=True)


def test_the_attention_is_the_one_that_is_asked_for(arguments, folder):
    for given in ({"model_name_or_path": str(folder)}, {"config_name": str(folder), "from_scratch": True}):
        asked = arguments(attn_implementation="eager", **given)
        model = load_model(AutoModelForSequenceClassification, asked, load_config(asked))
        assert model.config._attn_implementation == "eager"
        missing = arguments(attn_implementation="flash_attention_3", **given)
        with pytest.raises(InputError, match=r"(?i)flash_?attention_?3"):
            load_model(AutoModelForSequenceClassification, missing, load_config(missing))


def test_weights_in_several_files(arguments, folder):
    model, asked = load(arguments, folder), arguments(model_name_or_path=str(folder))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="5KB")
    parts = sorted(folder.glob("model-*.safetensors"))
    assert len(parts) > 1
    assert pretrained.check_weights(asked) is None


def test_a_models_content_is_not_its_spelling(folder, tmp_path, monkeypatch):
    moved, name = tmp_path / "moved", str(folder)
    shutil.copytree(folder, moved)
    monkeypatch.chdir(tmp_path)
    known = pretrained.model_content(name, name)
    assert set(known) == {"config.json", "model.safetensors"}
    assert [pretrained.model_content(other, other) for other in (f"{name}/", "moved", "./moved/")] == [
        known
    ] * 3
    flip(moved / "model.safetensors")
    changed = pretrained.model_content("moved", "moved")
    assert [name for name in known if changed[name] != known[name]] == ["model.safetensors"]
    assert pretrained.model_content("moved/config.json", None) == {"config.json": known["config.json"]}
    of_the_hub = {"config.json": "google/bert", "weights": "google/bert"}
    assert pretrained.model_content("google/bert", "google/bert") == of_the_hub
    assert pretrained.model_content(None, None) == {}


def test_the_message_of_transformers_is_cut_to_one_line(tmp_path):
    message = explain_failed_load("model", "name", OSError("first " + "x" * 300 + "\nsecond"))
    assert "OSError: first xxx" in message
    assert "second" not in message
    assert len(message) < 400
    assert "nothing" in explain_failed_load("model", str(tmp_path), ValueError(""))
