"""Languages and prefixes of titles, from the arguments to what plain transformers writes with best/."""

from types import SimpleNamespace

import numpy as np
import pytest
import titlegen
import torch
from refusals import problems_of
from text_tasks import SEARCH
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartTokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
)

from samerun.errors import InputError
from samerun.export import export_model
from samerun.launch import Launch
from samerun.models.encoder_decoder import special_ids, store_settings
from samerun.plan import Modes
from samerun.text.titles import model_card, plain_model
from samerun.text.tokenizer import TitleEncoder, set_languages

SIZES = {
    "d_model": 16,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16),
}
KINDS = [
    (MBartTokenizer, "en_XX", "ro_RO", "decoder_start_token_id"),
    (MBart50Tokenizer, "en_XX", "ro_RO", "forced_bos_token_id"),
    (NllbTokenizer, "eng_Latn", "fra_Latn", "forced_bos_token_id"),
]


def asked(source=None, target=None):
    return SimpleNamespace(
        source_lang=source, target_lang=target, tokenizer_name=None, model_name_or_path="runs/a"
    )


def tiny(tokenizer):
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    return MBartForConditionalGeneration(MBartConfig(**sizes, decoder_start_token_id=2))


@pytest.mark.parametrize(("kind", "source", "target", "setting"), KINDS)
def test_titles_are_in_the_target_language_also_in_plain_transformers(
    kind, source, target, setting, tmp_path
):
    tokenizer = kind()
    start = set_languages(tokenizer, asked(source, target))
    code = tokenizer.convert_tokens_to_ids(target)
    assert start == {setting: code}
    model = tiny(tokenizer)
    store_settings(model, start, source_prefix="tell: ")
    begin, end = special_ids(model.config, tokenizer)
    targets = TitleEncoder(tokenizer, begin, end, 8)([" "])["input_ids"][0]
    first = ([begin, *targets])[: 2 if setting == "forced_bos_token_id" else 1]
    assert first[-1] == code  # where teacher forcing has the language, generation has it
    assert (targets[-1], targets.count(end)) == (end, 1)
    export_model(
        tmp_path / "best", plain_model(model, SEARCH), model.state_dict(), lambda _: None, tokenizer, 16
    )
    loaded, words = (
        auto.from_pretrained(tmp_path / "best") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    assert (words.src_lang, words.tgt_lang, loaded.config.source_prefix) == (source, target, "tell: ")
    assert words("a")["input_ids"] == tokenizer("a")["input_ids"]
    assert tokenizer.convert_tokens_to_ids(source) in words("a")["input_ids"]
    written = loaded.generate(**words("a", return_tensors="pt"))[0].tolist()
    assert written[: len(first)] == first


def test_languages_that_a_tokenizer_does_not_have_are_refused():
    tokenizer = MBartTokenizer()
    assert set_languages(tokenizer, asked()) == {}
    assert tokenizer.tgt_lang is None
    found, told = problems_of(set_languages, tokenizer, asked("en_xx", "kl_KL")), "has no such language"
    assert [problem.split(" It has")[0] for problem in found] == [
        f"--source_lang en_xx: runs/a {told}; did you mean en_XX?",
        f"--target_lang kl_KL: runs/a {told}; did you mean lv_LV?",
    ]
    message = "--source_lang zh_CN: the tokenizer of runs/a has no language codes; leave it out"
    with pytest.raises(InputError, match=message):
        set_languages(BartTokenizer(), asked("zh_CN"))


def test_the_prefix_of_an_exported_model_is_used_without_being_named(tmp_path):
    """The whole way of a run: what it trains on, what it keeps, and what a later command reads."""
    rows = "text,title\n" + "a b c,a\nb c d,b\n"
    (tmp_path / "rows.csv").write_text(rows)
    letters = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdeilt:"]
    tokenizer = NllbTokenizer(vocab={letter: number for number, letter in enumerate(letters)})
    model = tiny(tokenizer)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    def load(name, modes, **given):
        files = {"train_file": str(tmp_path / "rows.csv"), "test_file": str(tmp_path / "rows.csv")}
        arguments = titlegen.Arguments(
            output_dir="runs/a",
            model_name_or_path=str(tmp_path / name),
            max_length=32,
            max_title_length=8,
            **files,
            **given,
        )
        task = titlegen.TitleGeneration(arguments)
        return task, task.load(Launch(), modes)

    languages = {"source_lang": "eng_Latn", "target_lang": "fra_Latn"}
    own = {"source_prefix": "title: ", "rouge_tokenizer": "words"}
    task, data = load("model", Modes(True, False, False), **own, **languages)
    _, plain = load("model", Modes(True, False, False), **languages)
    assert data.fingerprint != plain.fingerprint
    unnamed, _ = load("model", Modes(True, False, False))
    marks = "the tokenizer marks documents as eng_Latn"
    assert [any(marks in note for note in each.notes) for each in (unnamed, task)] == [True, False]
    with pytest.raises(InputError, match="--truncation_side left would cut --source_prefix off"):
        load("model", Modes(True, False, False), source_prefix="title: ", truncation_side="left")
    built = task.build()
    task.export(tmp_path / "best", built, built.state_dict(), None)
    again, found = load("best", Modes(False, False, True))
    assert (again.source_prefix, again.rouge_tokenizer(found.splits["test"])) == ("title: ", "words")
    rows = np.arange(2)
    first = data.splits["train"].tokens[0].tolist()
    assert task.tokenizer.decode(first) == "eng_Latn title: a b c</s>"
    trained, read = data.splits["train"].collate(rows), found.splits["test"].collate(rows)
    assert torch.equal(trained.inputs["input_ids"], read.inputs["input_ids"])
    assert torch.equal(trained.labels, read.labels)
    french = again.tokenizer.convert_tokens_to_ids("fra_Latn")
    assert set(read.labels[:, 0].tolist()) == {french}
    model = again.load_exported(tmp_path / "best")
    assert model.generation_config.forced_bos_token_id == french
    (tmp_path / "metrics.json").write_text("{}")
    usage = model_card(tmp_path, again.source_prefix, False, []).usage
    assert """tokenizer('title: ' + "a long document", truncation=True""" in usage
