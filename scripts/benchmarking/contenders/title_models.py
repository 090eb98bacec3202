"""The models of the sections on titles, as the application and as plain transformers make them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import titlegen
import torch

from finetune.arguments.parsing import parse

VOCABULARY = 8192
WIDER = 4.0  # see `make_writer`


def make_model(settings: dict[str, Any], rows: list[dict[str, str]], inputs: Path) -> Any:
    """The tokenizer; saves it with the configuration of a BigBird below inputs/model."""
    from transformers import BigBirdConfig

    from text.vocabulary import train_tokenizer

    block, longest = settings["block_size"], max([*settings["train_lengths"], settings["generate_length"] or 0, 4096])
    tokenizer = train_tokenizer([text for row in rows for text in (row["text"], row["title"])], VOCABULARY)
    config = BigBirdConfig(
        vocab_size=len(tokenizer), hidden_size=settings["hidden"], num_hidden_layers=settings["layers"],
        num_attention_heads=max(1, settings["hidden"] // 64), intermediate_size=4 * settings["hidden"],
        max_position_embeddings=-(-longest // block) * block, block_size=block, attention_type="block_sparse",
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.cls_token_id, eos_token_id=tokenizer.sep_token_id,
    )  # fmt: skip
    config.save_pretrained(inputs / "model")
    tokenizer.save_pretrained(inputs / "model")
    return tokenizer


def make_writer(settings: dict[str, Any], inputs: Path) -> None:
    """The model that writes titles, in plain transformers, below inputs/writer.

    Random weights are drawn wide, and no token is more frequent than another: with the usual ones every document would get much
    the same short title, and equal titles would say nothing.
    """
    given = {"do_train": True, "train_file": inputs / "documents.jsonl", "max_length": settings["generate_length"]}
    arguments = parse(titlegen.Arguments, argv=arguments_of(settings, given))
    data = titlegen.load_data(arguments, True, False, False)
    model = plain_model(arguments, data)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embeddings" not in name:
                parameter.mul_(WIDER)
        model.get_output_embeddings().bias.zero_()
    model.save_pretrained(inputs / "writer")
    data.tokenizer.save_pretrained(inputs / "writer")


def arguments_of(settings: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """What every use of the application is given, and more; the configuration, unless a model is given."""
    folder = Path(settings["inputs"], "model")
    new = {"config_name": folder, "tokenizer_name": folder, "from_scratch": True}
    common = {
        **({} if "model_name_or_path" in given else new),
        "decoder_layers": settings["decoder_layers"], "max_title_length": settings["title_length"],
        "num_beams": settings["beams"], "seed": settings["seed"], "report_to": "none", "overwrite_output_dir": True,
        "output_dir": settings["folder"], "mixed_precision": settings["precision"],
    }  # fmt: skip
    return [word for name, value in {**common, **given}.items() for word in (f"--{name}", str(value))]


def plain_model(arguments: Any, data: Any) -> Any:
    """`titlegen.build_model`'s model, the same weights, with transformers' own attention."""
    return titlegen.build_model(replace(arguments, attention="transformers"), data)


def load_writer(settings: dict[str, Any]) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(Path(settings["inputs"], "writer"))
