"""A run's files of documents with titles: read, checked, as tokens, and as batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from finetune.errors import InputError
from finetune.kernels.bigbird.plan import choose_attention, padding_of
from finetune.reading.columns import (
    SHOWN,
    blank_rows,
    check_ids,
    drop_blank,
    more,
    note_blank,
    note_cut,
    note_repeated_texts,
    read_splits,
    split_off,
    take,
    texts_of,
)
from finetune.reading.fingerprint import fingerprint
from finetune.reading.ragged import Ragged, RaggedChunks
from finetune.reading.stored_rows import Column
from finetune.reading.tables import Table
from finetune.reading.tokens import encode_cached
from finetune.task import Batch
from finetune.training.batches import lengths_of, pad_rows
from models.encoder_decoder import check_title_length, encoder_config, load_title_config, special_ids
from models.pretrained import check_weights, choose_max_length, load_config
from text.tokenizer import load_tokenizer, note_unknown, text_encoder, title_encoder, tokenizer_fingerprint

# What imports transformers is imported where it is needed: what is wrong with a file is told before.


@dataclass(frozen=True)
class Split:
    """One file, ready to be batched. `content`: the texts' and titles' fingerprint; `labels`: each row's title as ids, None for
    a file without titles."""

    table: Table
    texts: Column
    titles: Column | None
    content: str
    tokens: RaggedChunks
    labels: Ragged | None


@dataclass(frozen=True)
class Data:
    """The run's files and what they share."""

    train: Split | None
    validation: Split | None
    test: Split | None
    tokenizer: Any
    config: Any
    start_id: int
    max_length: int
    padding: int  # documents are padded to a multiple of this
    identity: dict[str, Any]
    notes: list[str]


def load_data(arguments: Any, train: bool, evaluate: bool, predict: bool) -> Data:
    """Reads and checks every file, tokenizes documents and titles. Raises `InputError` with what is wrong."""
    notes: list[str] = []
    text, titled = (arguments.text_column,), (arguments.text_column, arguments.title_column)
    required = {"train": titled} if train else {}
    required |= {"validation": titled} if evaluate else {}
    required |= {"test": text} if predict else {}
    tables = read_splits(arguments, required, train, optional=titled[1:])
    if train:
        tables["train"] = drop_blank(tables["train"], arguments.text_column, notes)
        if evaluate and "validation" not in tables:
            parts = split_off(tables["train"], arguments.validation_split, arguments.seed)
            tables["train"], tables["validation"] = (take(tables["train"], rows) for rows in parts)
            notes.append(f"{len(tables['validation'])} training rows are kept for validation (--validation_split)")
    for split, table in tables.items():
        check_titles(table, arguments.title_column, split)

    config = load_title_config(arguments)
    check_weights(arguments)
    if config.is_encoder_decoder:
        check_title_length(config, arguments.max_title_length)
    elif arguments.decoder_model_name_or_path:
        named = {"model_name_or_path": arguments.decoder_model_name_or_path, "config_name": None, "from_scratch": False}
        decoder = replace(arguments, **named)
        check_title_length(load_config(decoder), arguments.max_title_length)
        check_weights(decoder)
    tokenizer = load_tokenizer(arguments, vocabulary_texts(tables.get("train"), arguments))
    tokenizer.truncation_side = arguments.truncation_side
    start_id, end_id = special_ids(config, tokenizer)
    reader = encoder_config(config)
    max_length = choose_max_length(arguments.max_length, reader, tokenizer, default=4096)
    note = choose_attention(reader, max_length)
    notes += [note] if note else []
    ids = (start_id, end_id)
    stated = tokenizer_fingerprint(tokenizer)
    splits = {
        split: make_split(arguments, split, table, tokenizer, stated, max_length, ids, notes) for split, table in tables.items()
    }
    if train:
        tokens = int(splits["train"].tokens.lengths.sum())
        notes.insert(0, f"{len(splits['train'].texts)} training rows, {tokens} tokens of documents")
        note_repeated_texts({split: rows.texts for split, rows in splits.items()}, notes)
    return Data(
        train=splits.get("train"),
        validation=splits.get("validation"),
        test=splits.get("test"),
        tokenizer=tokenizer,
        config=config,
        start_id=start_id,
        max_length=max_length,
        padding=padding_of(reader),
        identity=identity_of(arguments, splits, stated, max_length),
        notes=notes,
    )


def vocabulary_texts(table: Table | None, arguments: Any) -> list[Column]:
    """What --tokenizer_type train learns its vocabulary from: documents and titles of the training rows."""
    if table is None or arguments.tokenizer_type != "train":
        return []
    return [table.columns[arguments.text_column], table.columns[arguments.title_column]]


def check_titles(table: Table, column: str, split: str) -> None:
    """Raises `InputError` for titles that are no text, and for empty ones except in rows that are only predicted."""
    if column not in table.columns or (split == "test" and all(title in (None, "") for title in table.columns[column])):
        table.columns.pop(column, None)
        return
    empty = blank_rows(texts_of(table, column))
    if len(empty):
        found = [f"{table.where(row)}: {column} is empty; give it a title or leave the row out" for row in empty]
        raise InputError(*found[:SHOWN], *more(len(empty)))


def make_split(
    arguments: Any, split: str, table: Table, tokenizer: Any, stated: str, max_length: int, ids: tuple[int, int],
    notes: list[str],
) -> Split:  # fmt: skip
    """Tokenizes a file's documents and titles and notes what was cut. `stated`: the tokenizer's fingerprint."""
    if split == "test":
        check_ids(table, arguments.id_column, notes)
    texts, workers = texts_of(table, arguments.text_column), arguments.preprocessing_num_workers
    encoded = encode_cached(texts, text_encoder(tokenizer, max_length), f"{stated} {max_length}", workers)
    titles = labels = None
    note_unknown(encoded["input_ids"], tokenizer, table.path, notes)
    note_cut(table, "documents", encoded["cut"], max_length, notes)
    content = [encoded["content"]]
    if arguments.title_column in table.columns:
        titles, most = table.columns[arguments.title_column], arguments.max_title_length
        encode = title_encoder(tokenizer, *ids, most)
        found = encode_cached(titles, encode, f"{stated} title {ids} {most}", workers)
        labels = found["input_ids"]
        note_cut(table, "titles", found["cut"], most, notes)
        content.append(found["content"])
    if split != "train":  # that has none left
        note_blank(table, texts, notes)
    return Split(table, texts, titles, fingerprint(content), encoded["input_ids"], labels)


def identity_of(arguments: Any, splits: dict[str, Split], tokenizer: str, max_length: int) -> dict[str, Any]:
    """What must be equal on every machine, and for a checkpoint to be this run's."""
    trained = {split: rows for split, rows in splits.items() if split != "test"}
    return {
        "task": "titlegen",
        "model": arguments.config_name or arguments.model_name_or_path,
        "decoder": arguments.decoder_model_name_or_path or arguments.decoder_layers,
        "tokenizer": tokenizer[:16],
        "max_length": max_length,
        "max_title_length": arguments.max_title_length,
        **{f"{split}_rows": len(rows.texts) for split, rows in trained.items()},
        **{f"{split}_content": rows.content[:16] for split, rows in trained.items()},
    }


def collator(split: Split, data: Data) -> Any:
    """A function from row numbers to a `Batch`: documents padded as the model's attention needs it, titles behind -100."""
    from models.titles import IGNORED

    tokenizer, shape = data.tokenizer, (data.tokenizer.padding_side, data.padding)
    reads_globally = data.config.model_type == "led"

    def collate(rows: np.ndarray) -> Batch:
        ids = [split.tokens[row] for row in rows]
        inputs = {
            "input_ids": pad_rows(ids, tokenizer.pad_token_id, *shape),
            "attention_mask": pad_rows([row * 0 + 1 for row in ids], 0, *shape),
        }
        if reads_globally:  # LED's first token sees everything, as in its pretraining
            inputs["global_attention_mask"] = torch.zeros_like(inputs["input_ids"])
            inputs["global_attention_mask"][:, 0] = 1
        labels = None if split.labels is None else pad_rows([split.labels[row] for row in rows], IGNORED)
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels, lengths_of(ids, tokenizer.padding_side))

    return collate
