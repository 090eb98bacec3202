"""A run's files of texts with labels: read, checked, as tokens and label numbers, and as batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.errors import InputError
from finetune.kernels.bigbird.plan import choose_attention, padding_of
from finetune.reading.columns import (
    check_ids,
    drop_blank,
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
from finetune.training.batches import lengths_of, one_hot, pad_rows
from models.classifier import choose_labels, labels_of
from models.pretrained import check_kind, check_weights, choose_max_length, load_config
from text.labels import Labelled, label_ids, label_names, note_labels
from text.tokenizer import load_tokenizer, note_unknown, text_encoder, tokenizer_fingerprint

# What imports transformers is imported where it is needed: what is wrong with a file is told before.


@dataclass(frozen=True)
class Split:
    """One file, ready to be batched. `content`: the texts' fingerprint; `labels`: each row's label numbers, None for a file
    without labels."""

    table: Table
    texts: Column
    content: str
    tokens: RaggedChunks
    labels: Ragged | None


@dataclass(frozen=True)
class Data:
    """The run's files and what they share."""

    train: Split | None
    validation: Split | None
    test: Split | None
    labels: list[str]
    tokenizer: Any
    config: Any
    max_length: int
    padding: int  # texts are padded to a multiple of this
    identity: dict[str, Any]
    notes: list[str]


def load_data(arguments: Any, train: bool, evaluate: bool, predict: bool) -> Data:
    """Reads and checks every file, decides the label list, tokenizes. Raises `InputError` with what is wrong."""
    notes: list[str] = []
    label_columns = arguments.label_columns or (arguments.label_column,)
    text, labelled = (arguments.text_column,), (arguments.text_column, *label_columns)
    required = {"train": labelled} if train else {}
    required |= {"validation": labelled} if evaluate else {}
    required |= {"test": text} if predict else {}  # rows that are only predicted need no labels
    tables = read_splits(arguments, required, train, optional=label_columns)
    if train:
        tables["train"] = drop_blank(tables["train"], arguments.text_column, notes)
    names = {
        split: label_names(table, arguments, notes)
        for split, table in tables.items()
        if all(column in table.columns for column in label_columns)
    }
    if train and evaluate and "validation" not in tables:
        parts = split_off(tables["train"], arguments.validation_split, arguments.seed)
        tables["train"], tables["validation"] = (take(tables["train"], rows) for rows in parts)
        names["train"], names["validation"] = map(names["train"].take, parts)
        notes.append(f"{len(tables['validation'])} training rows are kept for validation (--validation_split)")
    texts = {split: texts_of(table, arguments.text_column) for split, table in tables.items()}

    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    config = load_config(arguments)
    check_kind(arguments, config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "classify texts")
    check_weights(arguments)
    labels = choose_labels(config, names["train"].names, arguments.label_file, notes) if train else labels_of(config)
    if not labels:
        raise InputError(f"{tables['train'].path}: no row has a label; name the labels with --label_file if that is meant")

    tokenizer = load_tokenizer(arguments, [texts["train"]] if train else [])
    max_length = choose_max_length(arguments.max_length, config, tokenizer)
    note = choose_attention(config, max_length)
    notes += [note] if note else []
    tokenizer.truncation_side = arguments.truncation_side
    ids = number_labels(arguments, tables, names, labels, notes)  # before anything is tokenized: it may refuse a file
    stated = tokenizer_fingerprint(tokenizer)
    splits = {
        split: make_split(arguments, split, table, ids.get(split), tokenizer, stated, max_length, notes)
        for split, table in tables.items()
    }
    if train:
        rows, count = splits["train"], len(splits["train"].texts)
        notes.insert(0, f"{count} training rows, {int(rows.tokens.lengths.sum())} tokens, {len(labels)} labels, "
                        f"{len(rows.labels.values) / count:.2f} labels per row")  # fmt: skip
        note_labels({name: (one.table.path, one.labels) for name, one in splits.items() if name != "test"}, labels, notes)
        note_repeated_texts(texts, notes)
    return Data(
        train=splits.get("train"),
        validation=splits.get("validation"),
        test=splits.get("test"),
        labels=labels,
        tokenizer=tokenizer,
        config=config,
        max_length=max_length,
        padding=padding_of(config),
        identity=identity_of(arguments, splits, labels, stated, max_length),
        notes=notes,
    )


def number_labels(
    arguments: Any, tables: dict[str, Table], names: dict[str, Labelled], labels: list[str], notes: list[str]
) -> dict[str, Ragged]:
    """Each file's label numbers, of those that have labels. Raises `InputError` for labels that are not in the list."""
    ignore = arguments.unknown_labels == "ignore"
    if "train" not in tables:
        source = f"labels of {arguments.model_name_or_path}"
    else:
        source = "training data" if arguments.label_file is None else f"--label_file {arguments.label_file}"
    return {split: label_ids(tables[split], found, labels, ignore, notes, source) for split, found in names.items()}


def make_split(
    arguments: Any, split: str, table: Table, ids: Ragged | None, tokenizer: Any, stated: str, max_length: int,
    notes: list[str],
) -> Split:  # fmt: skip
    """Tokenizes a file's texts and notes what was cut. `ids`: label numbers; `stated`: the tokenizer's fingerprint."""
    if split == "test":
        check_ids(table, arguments.id_column, notes)
    texts = table.columns[arguments.text_column]
    encode, settings = text_encoder(tokenizer, max_length), f"{stated} {max_length}"
    encoded = encode_cached(texts, encode, settings, arguments.preprocessing_num_workers)
    note_unknown(encoded["input_ids"], tokenizer, table.path, notes)
    note_cut(table, "texts", encoded["cut"], max_length, notes)
    if split != "train":  # that has none left
        note_blank(table, texts, notes)
    return Split(table, texts, encoded["content"], encoded["input_ids"], ids)


def identity_of(arguments: Any, splits: dict, labels: list[str], tokenizer: str, max_length: int) -> dict[str, Any]:
    """What must be equal on every machine, and for a checkpoint to be this run's."""

    def rows(split: Split) -> str:
        numbers = [] if split.labels is None else [split.labels.values.tobytes(), split.labels.offsets.tobytes()]
        return fingerprint([split.content, *numbers])[:16]

    return {
        "task": "classify",
        "model": arguments.config_name or arguments.model_name_or_path,
        "labels": len(labels),
        "label_list": fingerprint(labels)[:16],
        "tokenizer": tokenizer[:16],
        "max_length": max_length,
        **{f"{split}_rows": len(s.texts) for split, s in splits.items() if split != "test"},
        **{f"{split}_content": rows(s) for split, s in splits.items() if split != "test"},
    }


def collator(split: Split, data: Data) -> Any:
    """A function from row numbers to a `Batch`: ids and mask padded to the longest row, labels as 0 and 1."""
    shape = (data.tokenizer.padding_side, data.padding)

    def collate(rows: np.ndarray) -> Batch:
        ids = [split.tokens[row] for row in rows]
        inputs = {
            "input_ids": pad_rows(ids, data.tokenizer.pad_token_id, *shape),
            "attention_mask": pad_rows([row * 0 + 1 for row in ids], 0, *shape),
        }
        labels = None if split.labels is None else one_hot(split.labels, rows, len(data.labels))
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels, lengths_of(ids, shape[0]))

    return collate
