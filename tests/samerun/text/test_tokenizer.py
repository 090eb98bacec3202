import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from tables import cells_of
from transformers import (
    AutoTokenizer,
    BertConfig,
    LEDConfig,
    LlamaConfig,
    Qwen2Config,
    RobertaConfig,
    T5Config,
)
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from samerun.errors import InputError
from samerun.text.tokenizer import (
    OFFSET_POSITIONS,
    TextEncoder,
    TitleEncoder,
    check_reload,
    choose_max_length,
    load_tokenizer,
    tokenizer_fingerprint,
)

TEXTS = ["sort the values of a matrix", "return the eigenvalues of the matrix and of its transpose"]


def test_a_tokenizer_without_padding(arguments, bert_folder, tmp_path):
    folder = shutil.copytree(bert_folder, tmp_path / "bert")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": None}))
    with pytest.raises(InputError, match="has no padding token"):
        load_tokenizer(arguments(tokenizer_name=str(folder)), [], [])


def test_a_tokenizer_that_transformers_would_replace(arguments, tokenizer):
    asked, texts = arguments(tokenizer_type="train"), [cells_of(TEXTS)]
    check_reload(tokenizer, LlamaConfig(), texts, asked)
    message = "--tokenizer_type train: transformers loads a Qwen2Tokenizer for a qwen2 model"
    with pytest.raises(InputError, match=message):
        check_reload(tokenizer, Qwen2Config(), texts, asked)


def test_a_vocabulary_is_trained_once(arguments, token_cache, monkeypatch):
    texts = cells_of(TEXTS)
    asked = arguments(tokenizer_type="train", vocab_size=128)
    first = load_tokenizer(asked, [texts], [])
    assert first.tokenize("matrix") == ["matrix"]

    def train_again(texts, vocab_size):
        raise RuntimeError("trained again")

    monkeypatch.setattr("samerun.text.tokenizer.train_tokenizer", train_again)
    assert load_tokenizer(asked, [texts], []).get_vocab() == first.get_vocab()
    for other, given in ((asked, texts[:1]), (replace(asked, vocab_size=129), texts)):
        with pytest.raises(RuntimeError, match="trained again"):
            load_tokenizer(other, [given], [])
    assert {path.suffix for path in (token_cache / "vocabularies").iterdir()} == {"", ".lock"}


def test_ids_and_whether_a_text_was_cut(tokenizer):
    encoded = TextEncoder(tokenizer, 8)(TEXTS)
    whole = tokenizer(TEXTS)["input_ids"]
    assert len(whole[0]) == 8 < len(whole[1])
    assert encoded["input_ids"] == [whole[0], [*whole[1][:7], tokenizer.sep_token_id]]
    assert encoded["cut"] == [False, True]
    tokenizer.truncation_side = "left"
    assert TextEncoder(tokenizer, 8)(TEXTS)["input_ids"][1] == [tokenizer.cls_token_id, *whole[1][-7:]]


def test_titles_have_their_end_and_no_start(tokenizer):
    start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    whole = tokenizer(TEXTS[0])["input_ids"]
    for most, cut in ((6, False), (7, False), (5, True)):
        found = TitleEncoder(tokenizer, start, end, most)(TEXTS[:1])
        assert found == {"input_ids": [[*whole[1:-1][:most], end]], "cut": [cut]}
    assert TitleEncoder(tokenizer, start, end, 5)([""]) == {"input_ids": [[end]], "cut": [False]}


def test_a_fingerprint_tells_tokenizers_apart_and_not_what_was_done_before(bert_folder, tokenizer):
    fresh = tokenizer_fingerprint(tokenizer)
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(bert_folder)) == fresh
    TextEncoder(tokenizer, 4)(TEXTS)
    assert tokenizer_fingerprint(tokenizer) == fresh
    tokenizer(TEXTS, padding=True)
    prints = {fresh, tokenizer_fingerprint(tokenizer)}
    assert len(prints) == 1
    tokenizer.truncation_side = "left"
    prints.add(tokenizer_fingerprint(tokenizer))
    for change in ({"do_lower_case": False}, {"unk_token": "[PAD]"}):
        prints.add(tokenizer_fingerprint(AutoTokenizer.from_pretrained(bert_folder, **change)))
    tokenizer.add_tokens(["eigen"])
    prints.add(tokenizer_fingerprint(tokenizer))
    assert len(prints) == 5


@pytest.mark.parametrize(
    ("requested", "config", "limit", "chosen"),
    [
        (None, BertConfig(max_position_embeddings=512), 10**30, 512),
        (None, BertConfig(max_position_embeddings=512), 256, 256),
        (None, RobertaConfig(max_position_embeddings=514, pad_token_id=1), 10**30, 512),
        (None, BertConfig(max_position_embeddings=-1), 10**30, 1024),
        (None, BertConfig(max_position_embeddings=-1), 0, 1024),
        (None, BertConfig(max_position_embeddings=4096), 10**30, 1024),
        (100, BertConfig(max_position_embeddings=128), 10**30, 100),
        (128, BertConfig(max_position_embeddings=128), 10**30, 128),
        (128, BertConfig(max_position_embeddings=128), 64, 128),  # its tokenizer's limit is a default
        (None, LEDConfig(max_encoder_position_embeddings=96, max_decoder_position_embeddings=9), 10**30, 96),
    ],
)
def test_the_length_of_a_document(requested, config, limit, chosen):
    tokenizer = SimpleNamespace(model_max_length=limit)
    assert choose_max_length(requested, config, tokenizer, 1024, True) == chosen


def test_a_length_that_is_refused():
    tokenizer = SimpleNamespace(model_max_length=64)
    for config, said in ((BertConfig(max_position_embeddings=32), "32 tokens"), (T5Config(), "such as T5")):
        with pytest.raises(InputError, match=said):
            choose_max_length(65, config, tokenizer, 1024, True)


def test_models_whose_positions_start_behind_the_padding_are_known():
    folder, found = Path(transformers.__file__).parent / "models", set()
    for name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        for source in (folder / model_type_to_module_name(name)).glob("modeling_*.py"):
            if "incremental_indices.long() + padding_idx" in source.read_text(encoding="utf-8"):
                found.add(name)
    assert {"roberta"} < found <= OFFSET_POSITIONS
