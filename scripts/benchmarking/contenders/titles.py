"""Contenders that train the same encoder-decoder on rows of one length, without padding; their rows and
models."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarking import application
from benchmarking.contenders.training import TrainingContender
from benchmarking.data import read_rows, write_rows

SOURCE_ROWS = 2000  # rows read from a file
VOCABULARY = 8192


class Titles(TrainingContender):
    """settings: "length", and those of `make_inputs`."""

    script = "titlegen"
    seq2seq = True

    def options(self) -> application.Options:
        s = self.settings
        folder = Path(s["inputs"], "model")
        return application.run_options(s) | {
            "config_name": folder, "tokenizer_name": folder, "from_scratch": True,
            "decoder_layers": s["decoder_layers"], "max_title_length": s["title_length"],
            "train_file": Path(s["inputs"], f"train_{s['length']}.jsonl"), "max_length": s["length"],
        }  # fmt: skip

    def plain_model(self) -> Any:
        ours = application.build(self.prepared[0])
        plain = type(ours)(ours.config)  # with transformers' own BigBird
        plain.load_state_dict(ours.state_dict())
        return plain.bfloat16() if self.choice.get("weights") == "bf16" else plain

    def token_rows(self) -> tuple[dict[str, list], Any]:
        task, split = self.prepared
        columns = {"input_ids": split.tokens, "labels": split.targets}
        lists = {name: [rows[i].tolist() for i in range(len(rows))] for name, rows in columns.items()}
        return lists, task.tokenizer


def make_inputs(settings: dict[str, Any]) -> dict[str, Any]:
    """Writes into settings["inputs"]: training rows for each (length, batch size) of settings["train"], and
    the configuration of a model."""
    inputs = Path(settings["inputs"])
    inputs.mkdir(parents=True, exist_ok=True)
    read = read_rows(settings["train_file"], SOURCE_ROWS)
    rows = [row for row in read if row.get("text") and row.get("title")]
    if not rows:
        raise SystemExit(
            f"{settings['train_file']}: none of its first {SOURCE_ROWS} rows has a text and a title"
        )
    tokenizer = make_model(settings, rows, inputs)
    for length, batch_size in settings["train"]:
        cut = cut_rows(rows, tokenizer, [length + 8] * batch_size * settings["steps"])
        write_rows(inputs / f"train_{length}.jsonl", cut)
    return {}


def cut_rows(rows: list[dict[str, str]], tokenizer: Any, lengths: list[int]) -> Iterator[dict[str, str]]:
    """Rows of about `lengths` tokens, special tokens included, cut from the joined documents. A text that
    starts or ends within a word may have a few tokens more."""
    ids = tokenizer([row["text"] for row in rows], add_special_tokens=False)["input_ids"]
    stream = itertools.cycle(itertools.chain.from_iterable(ids))
    titles = itertools.cycle(row["title"] for row in rows)
    for length, title in zip(lengths, titles, strict=False):
        part = itertools.islice(stream, length - tokenizer.num_special_tokens_to_add())
        yield {"text": tokenizer.decode(list(part)), "title": title}


def make_model(settings: dict[str, Any], rows: list[dict[str, str]], inputs: Path) -> Any:
    """Saves a tokenizer and the configuration of a BigBird in inputs/model. Returns the tokenizer."""
    from transformers import BigBirdConfig

    from samerun.text.tokenizer import train_tokenizer

    block, longest = settings["block_size"], max([*dict(settings["train"]), 4096])
    tokenizer = train_tokenizer([text for row in rows for text in (row["text"], row["title"])], VOCABULARY)
    config = BigBirdConfig(
        vocab_size=len(tokenizer), hidden_size=settings["hidden"], num_hidden_layers=settings["layers"],
        num_attention_heads=max(1, settings["hidden"] // 64), intermediate_size=4 * settings["hidden"],
        max_position_embeddings=-(-longest // block) * block, block_size=block, attention_type="block_sparse",
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
    )  # fmt: skip
    config.save_pretrained(inputs / "model")
    tokenizer.save_pretrained(inputs / "model")
    return tokenizer


CONTENDERS = {"ours": Titles.measure, "trainer": Titles.measure, "inputs": make_inputs}
