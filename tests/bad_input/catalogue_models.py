"""Tiny model folders for the catalogue: good ones, and copies that are damaged in one way each."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TEXTS = ["red apple pie fruit", "green grass grows", "red brick wall", "plain water", "blue sky wine pear"]
LABELS = ["fruit", "red", "green"]


def make_models(folder: Path) -> Path:
    """Fills `folder` with models by name and returns it. `config` is a BERT's configuration alone."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        BertConfig,
        BertForSequenceClassification,
        BertModel,
        BigBirdConfig,
        EncoderDecoderConfig,
        EncoderDecoderModel,
        GPT2Config,
    )

    from finetune.text.vocabulary import train_tokenizer

    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXTS, 128)
    tokenizer.model_max_length = 32
    larger = train_tokenizer([*TEXTS, "".join(map(chr, range(0x4E00, 0x4F00)))], 1000)

    def save(name: str, model: object, words: object = tokenizer) -> Path:
        model.save_pretrained(folder / name)
        if words is not None:
            words.save_pretrained(folder / name)
        return folder / name

    def spoiled(name: str, source: str, spoil: Callable[[Path], object]) -> None:
        spoil(Path(shutil.copytree(folder / source, folder / name)))

    bert = BertConfig(vocab_size=len(tokenizer), **SIZES)
    save("config", bert, None)
    trained = BertConfig(**bert.to_dict() | {"id2label": dict(enumerate(LABELS)), "label2id": None})
    trained.problem_type = "multi_label_classification"
    save("classifier", BertForSequenceClassification(trained))
    save("encoder", BertModel(bert))
    deep = BertConfig(**bert.to_dict() | {"num_hidden_layers": 2})
    save("two_layers", BertModel(deep))
    decoder = BertConfig(**bert.to_dict() | {"is_decoder": True, "add_cross_attention": True})
    pair = EncoderDecoderModel(encoder=BertModel(bert), decoder=AutoModelForCausalLM.from_config(decoder))
    for holder in (pair.config, pair.generation_config):
        holder.decoder_start_token_id, holder.eos_token_id, holder.pad_token_id = 2, 3, 0
    save("titles", pair)
    deep_pair = EncoderDecoderModel(encoder=BertModel(deep), decoder=AutoModelForCausalLM.from_config(decoder))
    deep_pair.config.decoder_start_token_id = 2
    save("titles_two_layers", deep_pair)
    save("gpt2", GPT2Config(vocab_size=128, n_embd=16, n_layer=1, n_head=2, n_positions=32), None)
    both = EncoderDecoderConfig(encoder=bert.to_dict(), decoder=BigBirdConfig(**SIZES).to_dict())
    save("bigbird_decoder", both, None)
    larger.save_pretrained(folder / "larger_tokenizer")
    (folder / "empty").mkdir()

    def edit(name: str, change: Callable[[dict], object]) -> Callable[[Path], object]:
        def spoil(place: Path) -> None:
            content = json.loads((place / name).read_text(encoding="utf-8"))
            change(content)
            (place / name).write_text(json.dumps(content), encoding="utf-8")

        return spoil

    def write(name: str, content: bytes) -> Callable[[Path], object]:
        return lambda place: (place / name).write_bytes(content)

    def cut(place: Path) -> None:
        file = place / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])

    def without_tokenizer(place: Path) -> None:
        for file in [*place.glob("tokenizer*"), *place.glob("vocab*"), *place.glob("special*")]:
            file.unlink()

    def as_pickle(place: Path) -> None:
        from safetensors.torch import load_file

        torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
        (place / "model.safetensors").unlink()

    def harmful_pickle(place: Path) -> None:
        (place / "model.safetensors").unlink()
        # "cposix\nsystem": a pickle that would run a command if anything unpickled it.
        (place / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch harmed'\ntR.")

    spoiled("no_config", "classifier", lambda place: (place / "config.json").unlink())
    spoiled("broken_config", "classifier", write("config.json", b'{"model_type": "bert",\n oops'))
    spoiled("empty_config", "classifier", write("config.json", b""))
    spoiled("config_is_a_list", "classifier", write("config.json", b"[1, 2]"))
    spoiled("config_not_utf8", "classifier", write("config.json", '{"model_type": "bert", "name": "红"}'.encode("gbk")))
    spoiled("config_without_type", "classifier", edit("config.json", lambda c: c.pop("model_type")))
    spoiled("unknown_type", "classifier", edit("config.json", lambda c: c.update(model_type="bertt")))
    spoiled("wrong_sizes", "classifier", edit("config.json", lambda c: c.update(hidden_size=15)))
    spoiled("text_for_a_size", "classifier", edit("config.json", lambda c: c.update(hidden_size="many")))
    spoiled("negative_layers", "classifier", edit("config.json", lambda c: c.update(num_hidden_layers=-1)))
    spoiled("other_sizes", "classifier", edit("config.json", lambda c: c.update(hidden_size=32)))
    spoiled("more_layers", "classifier", edit("config.json", lambda c: c.update(num_hidden_layers=2)))
    spoiled("fewer_layers", "two_layers", edit("config.json", lambda c: c.update(num_hidden_layers=1)))
    spoiled("titles_fewer_layers", "titles_two_layers", edit("config.json", lambda c: c["encoder"].update(num_hidden_layers=1)))
    spoiled("adapter", "classifier", write("adapter_config.json", b'{"peft_type": "LORA"}'))
    spoiled("vision", "classifier", write("config.json", b'{"model_type": "vit", "hidden_size": 16, "num_attention_heads": 2}'))
    spoiled(
        "fewer_labels", "classifier", edit("config.json", lambda c: c.update(id2label={"0": "fruit"}, label2id={"fruit": 0}))
    )
    spoiled(
        "gaps_in_labels", "classifier", edit("config.json", lambda c: c.update(id2label={"0": "a", "2": "b"}, label2id=None))
    )
    spoiled("no_weights", "classifier", lambda place: (place / "model.safetensors").unlink())
    spoiled("cut_weights", "classifier", cut)
    spoiled("weights_of_zeros", "classifier", write("model.safetensors", b"\0" * 5000))
    spoiled(
        "weights_are_a_pointer",
        "classifier",
        write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"),
    )
    spoiled("weights_of_another", "classifier", lambda place: shutil.copy(folder / "titles" / "model.safetensors", place))
    spoiled("pickle", "classifier", as_pickle)
    spoiled("harmful_pickle", "classifier", harmful_pickle)
    spoiled("no_tokenizer", "classifier", without_tokenizer)
    spoiled("broken_tokenizer", "classifier", write("tokenizer.json", b'{"version": "1.0", oops'))
    spoiled("tokenizer_not_one", "classifier", write("tokenizer.json", b"{}"))
    spoiled("broken_tokenizer_config", "classifier", write("tokenizer_config.json", b"{oops"))
    spoiled("larger_vocabulary", "classifier", lambda place: (without_tokenizer(place), larger.save_pretrained(place)))
    spoiled("nan_weights", "classifier", _with_nan)
    index = {"weight_map": {"w": "part-2.safetensors"}}

    def part(place: Path) -> None:
        (place / "model.safetensors").unlink()
        (place / "model.safetensors.index.json").write_text(json.dumps(index))

    spoiled("part_missing", "classifier", part)

    def escaping(place: Path) -> None:
        (place / "model.safetensors").unlink()
        (place / "model.safetensors.index.json").write_text("{oops")

    spoiled("broken_index", "classifier", escaping)
    spoiled("titles_cut", "titles", cut)
    spoiled("titles_no_tokenizer", "titles", without_tokenizer)
    spoiled("titles_larger", "titles", lambda place: (without_tokenizer(place), larger.save_pretrained(place)))
    return folder


def _with_nan(place: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(place / "model.safetensors")
    next(iter(weights.values())).fill_(float("nan"))
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})


TORN_WEIGHTS = struct.pack("<Q", 64) + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(64) + b"\0" * 8
