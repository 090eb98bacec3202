"""What all text tasks share: files read and tokenized, batches padded, notes for the reader."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.errors import InputError, TrainingError
from finetune.kernels.bigbird.plan import choose_attention, padding_of
from finetune.kernels.enable import enable_device_kernels, enable_kernels
from finetune.kernels.padding_free.support import check_padding_free
from finetune.launching.launch import Launch
from finetune.models import adapters
from finetune.models.contributions import word_contributions
from finetune.models.export import export_model
from finetune.models.pretrained import check_vocabulary, choose_max_length, load_config, load_model_and_new_names, model_content
from finetune.plan import Modes
from finetune.reading.columns import (
    check_ids,
    drop_blank,
    ids_of,
    note_blank,
    note_cut,
    note_repeated_texts,
    split_off,
    take,
    texts_of,
)
from finetune.reading.fingerprint import fingerprint
from finetune.reading.ragged import Ragged, RaggedChunks
from finetune.reading.splits import read_splits
from finetune.reading.stored_rows import Column
from finetune.reading.tables import Table
from finetune.reading.tokens import encode_cached
from finetune.reports.data import describe_texts
from finetune.task import Batch, Data, Described, Mixture, Split, Task
from finetune.text.long_documents import LongDocuments
from finetune.text.tokenizer import load_tokenizer, note_unknown, tokenizer_fingerprint

EXPLAINED_LABELS = 5
PADDING_FREE_NOTE = "the encoder computes without padding (--padding_free); its dropout is another sample than with padding"


@dataclass(frozen=True, kw_only=True)
class TextSplit(Split):
    """The texts of a split. `targets`: each row's label numbers or title ids, None without; `texts`, `titles`: columns;
    `where`: what messages call a row of several files."""

    tokens: Ragged | RaggedChunks
    targets: Ragged | RaggedChunks | None
    texts: Sequence[str]
    titles: Column | None = None
    where: Callable[[int], str] | None = None


class TextTask(Task):
    """Loading for tasks whose rows are texts. A task says what its targets are and which model reads the texts.

    After `load` there are `launch`, `modes`, `config`, `tokenizer`, `max_length`, `long_documents`, `splits`, `padding_free`.
    """

    takes = "texts"
    default_max_length = 512
    memory_advice = "a smaller --max_tokens_per_micro_batch or --max_length, "
    source_prefix = ""  # stands before each text
    labels: Sequence[str] = ()  # of a task whose targets are numbers of labels

    @abstractmethod
    def target_columns(self) -> tuple[str, ...]:
        """The columns that training and validation rows must have beside the text."""

    @abstractmethod
    def read_targets(self, table: Table, split: str, notes: list[str]) -> Any | None:
        """The targets as they are written in the file, checked, with `take(rows)`; None for a file without."""

    @abstractmethod
    def load_model_config(self, targets: dict[str, Any], notes: list[str]) -> Any:
        """The model's configuration, checked. `targets`: by split."""

    def encoder_config(self) -> Any:
        """The part of the configuration that is the encoder's."""
        return self.config

    def prepare_tokenizer(self, tokenizer: Any) -> None:
        """Settings of the tokenizer that are the task's. Raises `InputError`."""

    def vocabulary_columns(self, table: Table) -> list[Column]:
        """What --tokenizer_type train learns its vocabulary from."""
        return [table.columns[self.arguments.text_column]]

    @abstractmethod
    def encode_targets(self, tables: dict[str, Table], targets: dict[str, Any], notes: list[str]) -> dict[str, Ragged]:
        """Each split's targets as numbers. Raises `InputError` for what is wrong with them; the texts are tokenized later."""

    @abstractmethod
    def target_tensor(self, targets: Ragged, rows: np.ndarray) -> torch.Tensor:
        """(b, ...) the targets of some rows, as `Batch.labels`."""

    def extra_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inputs that the model needs besides ids and mask."""
        return {}

    def sampling_weights(self, targets: Any) -> np.ndarray | None:
        """(rows,) how likely each training row is drawn; None: every row once an epoch."""
        return None

    def load(self, launch: Launch, modes: Modes) -> Data:
        """Reads and checks the files, tokenizes texts. Raises `InputError`."""
        arguments, notes = self.arguments, []
        self.launch, self.modes = launch, modes
        adapters.check_quantization(arguments, launch)
        tables, targets = self._read(modes, notes)
        self.config = self.load_model_config(targets, notes)
        train = tables.get("train")
        columns = self.vocabulary_columns(train) if train is not None and arguments.tokenizer_type == "train" else []
        self.tokenizer = load_tokenizer(arguments, columns, notes)
        self.tokenizer.truncation_side = arguments.truncation_side
        self.prepare_tokenizer(self.tokenizer)
        encoder = self.encoder_config()
        self.max_length = choose_max_length(arguments.max_length, encoder, self.tokenizer, self.default_max_length)
        self.long_documents = LongDocuments.of(arguments, self.config, self.tokenizer, self.max_length)
        note = choose_attention(encoder, self.max_length)
        notes += [note] if note else []
        self.padding_free = check_padding_free(
            "off" if arguments.attn_implementation else arguments.padding_free,
            kernels=arguments.kernels,
            config=encoder,
            on_gpu=launch.device_type == "cuda",
            padding_side=self.tokenizer.padding_side,
        )
        enable_device_kernels(torch.device(launch.device_type), kernels=arguments.kernels)
        encoded = self.encode_targets(tables, targets, notes)
        tokenizer = tokenizer_fingerprint(self.tokenizer)
        self.splits = {name: self._split(name, table, encoded.get(name), tokenizer, notes) for name, table in tables.items()}
        if modes.train:
            tokens = int(self.splits["train"].tokens.lengths.sum())
            notes.insert(0, f"{len(self.splits['train'])} training rows, {tokens} tokens")
            note_repeated_texts({name: split.texts for name, split in self.splits.items()}, notes)
        notes += [PADDING_FREE_NOTE] if self.padding_free else []
        if arguments.test_file is not None and not modes.predict:
            notes.append(f"--test_file {' '.join(arguments.test_file)} is not read: --do_predict is not given")
        return Data(self.splits, self._fingerprint(tokenizer), notes, self.padding_free)

    def describe(self, name: str, closely: bool = False) -> Described:
        split, labels = self.splits[name], None
        if isinstance(split.targets, Ragged):
            labels = [tuple(self.labels[number] for number in split.targets[row]) for row in range(len(split))]
        titles = None if split.titles is None else list(split.titles)
        return describe_texts(split.texts, titles, labels, (split.lengths, self.max_length))

    def describe_files(self, launch: Launch, modes: Modes) -> tuple[dict[str, Described], list[str]]:
        """Without a model or tokenizer lengths are in words."""
        arguments, notes, found = self.arguments, [], {}
        if arguments.model_name_or_path or arguments.tokenizer_name or arguments.tokenizer_type == "train":
            return super().describe_files(launch, modes)
        tables, targets = self._read(modes, notes)
        for name, table in tables.items():
            labels, titles = getattr(targets[name], "rows", None), self.titles_of(table)
            found[name] = describe_texts(table.columns[arguments.text_column], titles and list(titles), labels)
        return found, notes

    def _read(self, modes: Modes, notes: list[str]) -> tuple[dict[str, Table], dict[str, Any]]:
        arguments = self.arguments
        text, full = (arguments.text_column,), (arguments.text_column, *self.target_columns())
        required = {"train": full} if modes.train else {}
        required |= {"validation": full} if modes.evaluate else {}
        required |= {"test": text} if modes.predict else {}  # rows that are only predicted need no targets
        tables = read_splits(arguments, required, modes.train, optional=self.target_columns())
        if modes.train:
            tables["train"] = drop_blank(tables["train"], arguments.text_column, notes)
        targets = {name: self.read_targets(table, name, notes) for name, table in tables.items()}
        if modes.train and modes.evaluate and "validation" not in tables:
            parts = split_off(tables["train"], arguments.validation_split, arguments.seed)
            rows = dict(zip(("train", "validation"), parts, strict=True))
            table, target = tables["train"], targets["train"]
            tables |= {name: take(table, part) for name, part in rows.items()}
            targets |= {name: target.take(part) for name, part in rows.items()}
            notes.append(f"{len(rows['validation'])} training rows are kept for validation (--validation_split)")
        for table in tables.values():
            texts_of(table, arguments.text_column)
        return tables, targets

    def _split(self, name: str, table: Table, targets: Ragged | None, tokenizer: str, notes: list[str]) -> TextSplit:
        """Tokenizes a file's texts and notes what was cut. `tokenizer`: its fingerprint."""
        arguments = self.arguments
        if name == "test":
            check_ids(table, arguments.id_column)
        texts = table.columns[arguments.text_column]
        encode, settings = self.long_documents.encoder(self.tokenizer, self.source_prefix), f"{tokenizer} {self.max_length}"
        settings += f" {self.source_prefix!r}" if self.source_prefix else ""
        settings = " ".join([settings, *map(str, self.long_documents.fingerprint().values())])
        encoded = encode_cached(texts, encode, settings, arguments.preprocessing_num_workers)
        tokens = encoded["input_ids"]
        note_unknown(tokens, self.tokenizer, table.path, notes)
        note_cut(table, "texts", encoded["cut"], self.long_documents.limit, notes)
        if name != "train":  # that has none left
            note_blank(table, texts, notes)
        return TextSplit(
            path=table.path,
            collate=partial(self._collate, tokens, targets),
            num_rows=len(texts),
            labelled=targets is not None,
            lengths=tokens.lengths,
            padding_multiple=(multiple := padding_of(self.encoder_config())),
            widths=self.long_documents.widths(tokens.lengths, multiple),
            ids=ids_of(table, arguments.id_column),
            tokens=tokens,
            mixture=mixture_of(table, arguments.mixing_weights, notes) if name == "train" else None,
            targets=targets,
            weights=self.sampling_weights(targets) if name == "train" else None,
            texts=texts,
            titles=self.titles_of(table),
            where=table.where if table.sources else None,
        )

    def rows_in_memory(self, items: Sequence[str]) -> TextSplit:
        texts = check_texts(items)
        tokens = Ragged.of(self.long_documents.encoder(self.tokenizer, self.source_prefix)(texts)["input_ids"])
        multiple, lengths = padding_of(self.encoder_config()), tokens.lengths.astype(np.int64)
        return TextSplit(
            path="texts",
            collate=partial(self._collate, tokens, None),
            num_rows=len(texts),
            labelled=False,
            lengths=lengths,
            padding_multiple=multiple,
            widths=self.long_documents.widths(lengths, multiple),
            tokens=tokens,
            targets=None,
            texts=texts,
        )

    def explain(self, model: torch.nn.Module, item: str, line: dict[str, Any]) -> dict[str, Any]:
        """Of a classifier: its thresholds, and what each word of the beginning that a model reads at once contributed to the
        likeliest labels."""
        if "probabilities" not in line:
            return {}
        labels = list(line["probabilities"])
        shown = sorted(labels, key=line["probabilities"].get, reverse=True)[:EXPLAINED_LABELS]
        encoded = self.tokenizer(
            item, truncation=True, max_length=self.max_length, return_offsets_mapping=True, return_tensors="pt"
        )
        in_windows = self.long_documents.way == "windows"
        words = word_contributions(model, encoded, [labels.index(label) for label in shown], in_windows=in_windows)
        thresholds = dict(zip(labels, map(float, self.thresholds), strict=True))
        return {"thresholds": thresholds, "words": dict(zip(shown, words, strict=True))}

    def titles_of(self, table: Table) -> Column | None:
        """The reference texts of a file, for tasks that are scored by them."""
        return None

    def _collate(self, tokens: Ragged | RaggedChunks, targets: Any, rows: np.ndarray) -> Batch:
        """Ids and mask, padded to the longest row of the batch and to what the model's attention needs; (b, windows, width) if
        documents are read in windows."""
        side, multiple = self.tokenizer.padding_side, padding_of(self.encoder_config())
        ids = [tokens[row] for row in rows]
        pieces, windows = self.long_documents.pieces(ids)
        inputs = {
            "input_ids": pad_rows(pieces, self.tokenizer.pad_token_id, side, multiple),
            "attention_mask": pad_rows([np.ones_like(row) for row in pieces], 0, side, multiple),
        }
        inputs |= self.extra_inputs(inputs)
        lengths = lengths_of(ids, side)
        if windows is not None:
            inputs = {name: tensor.unflatten(0, (len(rows), windows)) for name, tensor in inputs.items()}
            lengths = tuple(map(len, ids))
        labels = None if targets is None else self.target_tensor(targets, rows)
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels, lengths)

    def _fingerprint(self, tokenizer: str) -> dict[str, Any]:
        """What must be equal on every machine, and for a checkpoint to be this run's."""
        trained = {name: split for name, split in self.splits.items() if name != "test"}
        configuration, weights = self.arguments.config_name, self.arguments.model_name_or_path
        return {
            "task": self.name,
            "model": model_content(configuration or weights, None if self.arguments.from_scratch else weights),
            **self.task_fingerprint(),
            **adapters.fingerprint(self.arguments),
            "tokenizer": tokenizer[:16],
            "max_length": self.max_length,
            **self.long_documents.fingerprint(),
            **_mixing(trained.get("train")),
            **{f"{name}_rows": len(split) for name, split in trained.items()},
            **{f"{name}_content": _content(split)[:16] for name, split in trained.items()},
        }

    def task_fingerprint(self) -> dict[str, Any]:
        """What the task adds to the run's fingerprint."""
        return {}

    def load_for_prediction(self, auto_class: Any, path: str | Path) -> tuple[torch.nn.Module, set[str]]:
        """(the model of a folder or of the hub, the parameters that it has no weights for)."""
        arguments = replace(self.arguments, model_name_or_path=str(path), config_name=None, from_scratch=False)
        named = str(path) == self.arguments.model_name_or_path
        return load_model_and_new_names(auto_class, arguments, self.config if named else load_config(arguments))

    def learning_rate_scale(self, model: torch.nn.Module, parameter: str) -> float:
        decay = self.arguments.layerwise_lr_decay
        if decay is None or ".decoder." in f".{parameter}":
            return 1.0
        return adapters.layerwise_scale(parameter, self.encoder_config().num_hidden_layers, decay)

    @property
    def rounding(self) -> str:
        """The precision whose rounding lies between the trained model and best/."""
        return adapters.rounded_as(self.arguments, self.launch.precision)

    def save_best(
        self,
        path: Path,
        model: Any,
        plain: Any,
        weights: dict[str, torch.Tensor],
        check: Callable,
        *,
        change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
    ) -> None:
        """Writes best/. `plain`: a model of the trained `model`'s class and configuration, without weights; `change`: what is
        done to the weights that it is saved with."""
        saved, weights = adapters.to_export(model, plain, weights, self.arguments)
        weights = weights if change is None else change(weights)
        export_model(path, saved, weights, check, self.tokenizer, self.max_length)

    def limits(self) -> list[str]:
        return [f"Texts are cut to {self.long_documents.limit} tokens."]

    def with_kernels(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with the faster computations that the arguments allow, of whole documents; its vocabulary is checked."""
        check_vocabulary(model, self.tokenizer)
        arguments = self.arguments
        enable_kernels(model, kernels=arguments.kernels, attention=arguments.attention, padding_free=self.padding_free)
        return self.long_documents.prepare(model, self.tokenizer.padding_side)


def mixture_of(table: Table, weights: Sequence[float] | None, notes: list[str]) -> Mixture | None:
    """How --mixing_weights mixes the files of a table, with a note; None without weights. Raises `InputError` for a file that
    would give no rows."""
    if weights is None:
        return None
    total, numbers = sum(weights), np.array([source.argument for source in table.sources])
    mixture = Mixture(numbers[table.source], tuple(weight / total for weight in weights))
    there = np.bincount(mixture.source, minlength=len(weights))
    paths = [next(source.path for source in table.sources if source.argument == number) for number in range(len(weights))]
    problems = [
        f"--mixing_weights: {path}, with a weight of {weight:g}, gives no row to an epoch of {len(table)} ({rows} of its rows "
        "are left for training); give it more rows or a larger weight, or leave it out"
        for path, weight, rows, count in zip(paths, weights, there, mixture.counts, strict=True)
        if not rows or not count
    ]
    if problems:
        raise InputError(*problems)
    shares = [f"{count} from the {rows} of {path}" for path, rows, count in zip(paths, there, mixture.counts, strict=True)]
    notes.append(f"rows of an epoch: {', '.join(shares)} (--mixing_weights)")
    return mixture


def check_texts(items: Sequence[str]) -> list[str]:
    """The texts as a list. Raises `InputError` for one that is no whole Unicode."""
    for number, text in enumerate(items):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"text {number}: holds half of a character (a lone surrogate): remove or complete it") from None
    return list(items)


def check_finite(values: np.ndarray, what: str, split: TextSplit) -> None:
    """Raises `TrainingError` naming the first row of a file whose values, (rows, ...), are NaN or infinite."""
    wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if not len(wrong):
        return
    row, some = int(wrong[0]), len(wrong) < len(values)
    where = f"{split.path}: the model's {what} are not finite for {len(wrong)} of {len(values)} rows"
    place = f"row {row} (0-based)" if split.where is None else split.where(row)
    first = f"first for {place}, {split.texts[row]!r:.60}"
    advice = "it overflows on them: leave them out, or compute with --mixed_precision no" if some else "it diverged"
    raise TrainingError(f"{where}, {first}; {advice}. Or try a smaller --learning_rate")


def pad_rows(rows: Sequence[np.ndarray], pad_value: int, side: str = "right", multiple: int = 1) -> torch.Tensor:
    """(b, width) int64: rows padded to the longest of them, of one token at least, rounded up to `multiple`."""
    width = -(-max(1, *(len(row) for row in rows)) // multiple) * multiple
    padded = np.full((len(rows), width), pad_value, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        if side == "right":
            target[: len(row)] = row
        else:
            target[width - len(row) :] = row
    return torch.from_numpy(padded)


def lengths_of(rows: Sequence[np.ndarray], side: str) -> tuple[int, ...] | None:
    """`Batch.lengths` of rows that are padded on that side; None as well if a row has no token."""
    lengths = tuple(map(len, rows))
    return lengths if side == "right" and min(lengths) > 0 else None


def _mixing(split: TextSplit | None) -> dict[str, Any]:
    """What a mixture adds to the fingerprint: the order of rows follows from it."""
    mixture = None if split is None else split.mixture
    return {} if mixture is None else {"mixing": [list(mixture.weights), np.bincount(mixture.source).tolist()]}


def _content(split: TextSplit) -> str:
    """A hash of a file's texts and targets."""
    if split.titles is not None:
        return fingerprint([split.texts.fingerprint, split.titles.fingerprint])
    labels = [] if split.targets is None else [split.targets.values.tobytes(), split.targets.offsets.tobytes()]
    return fingerprint([split.texts.fingerprint, *labels])
