"""Tiny model folders for the catalogue of bad input: valid models, and copies with one error each."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import encoder_decoder, sizes
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BigBirdConfig,
    EncoderDecoderConfig,
    GPT2Config,
)

from samerun.text.tokenizer import train_tokenizer

SIZES = sizes(16, inner=16) | {
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0
}  # fmt: skip
TEXTS = ["red apple pie fruit", "green grass grows", "red brick wall", "plain water", "blue sky wine pear"]
LABELS = ["fruit", "red", "green"]


def make_models(folder: Path) -> Path:
    """Writes all models into `folder`, each in a folder with its name. Returns `folder`."""
    make_valid_models(folder)
    for name, damage in DAMAGED.items():
        damage(Path(shutil.copytree(folder / "classifier", folder / name)))
    config(lambda c: c.update(num_hidden_layers=1))(folder / "fewer_layers")
    return folder


def make_valid_models(folder: Path) -> None:
    """`config` is a BERT configuration without weights."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXTS, 128)
    tokenizer.model_max_length = 32
    given = SIZES | {"vocab_size": len(tokenizer)}
    bert = BertConfig(**given)
    labelled = BertConfig(**given, id2label=dict(enumerate(LABELS)))
    labelled.problem_type = "multi_label_classification"
    models = {
        "classifier": BertForSequenceClassification(labelled),
        "encoder": BertModel(bert),
        "fewer_layers": BertModel(
            BertConfig(**given | {"num_hidden_layers": 2})
        ),  # and a configuration of one
        "titles": encoder_decoder(given),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    bert.save_pretrained(folder / "config")
    gpt2 = GPT2Config(vocab_size=128, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    gpt2.save_pretrained(folder / "gpt2")
    bigbird_decoder = EncoderDecoderConfig(encoder=bert.to_dict(), decoder=BigBirdConfig(**SIZES).to_dict())
    bigbird_decoder.save_pretrained(folder / "bigbird_decoder")
    larger = train_tokenizer([*TEXTS, "".join(map(chr, range(0x4E00, 0x4F00)))], 1000)
    larger.save_pretrained(folder / "larger_tokenizer")


# The functions below damage the model in the folder `model`.


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda model: (model / name).write_bytes(content)


def config(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def damage(model: Path) -> None:
        content = json.loads((model / "config.json").read_text(encoding="utf-8"))
        change(content)
        (model / "config.json").write_text(json.dumps(content), encoding="utf-8")

    return damage


def cut_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def remove_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def remove_tokenizer(model: Path) -> None:
    for file in [*model.glob("tokenizer*"), *model.glob("vocab*"), *model.glob("special*")]:
        file.unlink()


def larger_tokenizer(model: Path) -> None:
    remove_tokenizer(model)
    shutil.copytree(model.parent / "larger_tokenizer", model, dirs_exist_ok=True)


def weights_as_pickle(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    remove_weights(model)


def harmful_pickle(model: Path) -> None:
    remove_weights(model)
    # "cposix\nsystem": unpickling would run a command.
    (model / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch harmed'\ntR.")


def nan_weights(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    next(iter(weights.values())).fill_(float("nan"))
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def index(content: str, model: Path) -> None:
    remove_weights(model)
    (model / "model.safetensors.index.json").write_text(content)


VISION = b'{"model_type": "vit", "hidden_size": 16, "num_attention_heads": 2}'
# Name of a copy of `classifier` -> its damage.
DAMAGED: dict[str, Callable[[Path], object]] = {
    "no_config": lambda model: (model / "config.json").unlink(),
    "broken_config": write("config.json", b'{"model_type": "bert",\n oops'),
    "unknown_type": config(lambda c: c.update(model_type="bertt")),
    "wrong_sizes": config(lambda c: c.update(hidden_size=15)),
    "text_for_a_size": config(lambda c: c.update(hidden_size="many")),
    "negative_layers": config(lambda c: c.update(num_hidden_layers=-1)),
    "other_sizes": config(lambda c: c.update(hidden_size=32)),
    "more_layers": config(lambda c: c.update(num_hidden_layers=2)),
    "adapter": write("adapter_config.json", b'{"peft_type": "LORA"}'),
    "vision": write("config.json", VISION),
    "gaps_in_labels": config(lambda c: c.update(id2label={"0": "a", "2": "b"}, label2id=None)),
    "no_weights": remove_weights,
    "cut_weights": cut_weights,
    "pickle": weights_as_pickle,
    "harmful_pickle": harmful_pickle,
    "no_tokenizer": remove_tokenizer,
    "copied_in_part": write(".files.json", b'["tokenizer.model"]'),
    "broken_tokenizer": write("tokenizer.json", b'{"version": "1.0", oops'),
    "larger_vocabulary": larger_tokenizer,
    "nan_weights": nan_weights,
    "part_missing": partial(index, '{"weight_map": {"w": "part-2.safetensors"}}'),
    "broken_index": partial(index, "{oops"),
}
