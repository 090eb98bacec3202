"""The base class of text tasks: loads files, tokenizer and configuration, and exports the model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samerun.data.stream import Buffers
from samerun.data.tables import (
    Cells,
    Table,
    check_ids,
    ids_of,
    note_blank,
    note_cut,
    note_repeated_texts,
    texts_of,
)
from samerun.data.tokens import Ragged, encode_cached
from samerun.kernels.bigbird import choose_attention, padding_of
from samerun.kernels.enable import check_padding_free, enable_kernels
from samerun.models import adapters
from samerun.models.contributions import words_of_likeliest
from samerun.models.export import export_model
from samerun.models.pretrained import check_vocabulary, load_config, load_model_and_new_names
from samerun.models.weight_files import model_content
from samerun.plan import Modes
from samerun.runtime import Launch
from samerun.task import Data, Task, mixing_fingerprint
from samerun.text.long_documents import LongDocuments
from samerun.text.splits import TextCollator, TextSplit, TextStream, check_texts, mixture_of, read_tables
from samerun.text.tokenizer import choose_max_length, load_tokenizer, note_unknown, tokenizer_fingerprint

PADDING_FREE_NOTE = (
    "the encoder computes without padding (--padding_free); dropout masks differ from those with padding"
)


class TextTask(Task):
    """Base class of tasks whose rows are texts. A subclass defines the targets and the model.

    `load` sets `launch`, `modes`, `config`, `tokenizer`, `max_length`, `long_documents`, `collator` and
    `splits`.
    """

    input_kind = "texts"
    default_max_length = 512
    memory_advice = "a smaller --max_tokens_per_micro_batch or --max_length, "
    source_prefix = ""  # put before each text
    labels: Sequence[str] = ()  # of a task whose targets are label ids
    buffers: Buffers | None = None  # of streamed training rows

    @abstractmethod
    def target_columns(self) -> tuple[str, ...]:
        """The required columns of training and validation rows beside the text."""

    @abstractmethod
    def read_targets(self, table: Table, split: str, notes: list[str]) -> Any | None:
        """The checked targets of a file, with a method `take(rows)`; None for a file without targets."""

    @abstractmethod
    def load_model_config(self, targets: dict[str, Any], notes: list[str]) -> Any:
        """The model's configuration, checked. `targets`: by split."""

    def encoder_config(self) -> Any:
        """The encoder's part of the configuration."""
        return self.config

    def prepare_tokenizer(self, tokenizer: Any) -> None:
        """Applies the task's settings to the tokenizer. Raises `InputError`."""

    def vocabulary_columns(self, table: Table) -> list[Cells]:
        """The columns on which --tokenizer_type train trains."""
        return [table.columns[self.arguments.text_column]]

    @abstractmethod
    def encode_targets(self, table: Table, targets: Any, notes: list[str]) -> Ragged:
        """The ids of a split's targets. Called before texts are tokenized. Raises `InputError`."""

    def prepare_targets(self, tables: dict[str, Table], encoded: dict[str, Ragged], notes: list[str]) -> None:
        """Derives settings from the targets of all splits, such as weights of the loss. `encoded`: by
        split."""

    @abstractmethod
    def target_tensor(self, targets: Ragged, rows: np.ndarray) -> torch.Tensor:
        """(b, ...) targets of these rows, for `Batch.labels`."""

    def extra_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Model inputs besides ids and mask."""
        return {}

    def sampling_weights(self, targets: Any) -> np.ndarray | None:
        """(rows,) sampling probability of each training row; None: every row once per epoch."""
        return None

    def load(self, launch: Launch, modes: Modes) -> Data:
        """Reads and checks files, loads configuration and tokenizer, tokenizes texts. Raises `InputError`."""
        arguments, notes = self.arguments, []
        self.launch, self.modes = launch, modes
        adapters.check_quantization(arguments, launch)
        tables, targets = self.read_files(modes, notes)
        self.config = self.load_model_config(targets, notes)
        self._load_tokenizer(tables.get("train"), notes)
        self._choose_kernels(notes)
        encoded = {}
        for name, split_targets in targets.items():
            if split_targets is not None:
                with self._first_buffer_cache(name):
                    encoded[name] = self.encode_targets(tables[name], split_targets, notes)
        self.prepare_targets(tables, encoded, notes)
        tokenizer, self.splits = tokenizer_fingerprint(self.tokenizer), {}
        for name, table in tables.items():
            with self._first_buffer_cache(name):
                self.splits[name] = self._split(name, table, encoded.get(name), tokenizer, notes)
        if self.buffers is not None:
            self.splits["train"] = replace(
                self.splits["train"], stream=TextStream(self.buffers, self.buffer_split)
            )
        if modes.train:
            tokens = int(self.splits["train"].tokens.lengths.sum())
            notes.insert(0, f"{len(self.splits['train'])} training rows, {tokens} tokens")
            note_repeated_texts({name: split.texts for name, split in self.splits.items()}, notes)
        notes += [PADDING_FREE_NOTE] if arguments.padding_free else []
        if arguments.test_file is not None and not modes.predict:
            notes.append(
                f"--test_file {' '.join(arguments.test_file)} is not read: --do_predict is not given"
            )
        return Data(self.splits, self._fingerprint(tokenizer), notes, arguments.padding_free)

    def _load_tokenizer(self, train: Table | None, notes: list[str]) -> None:
        """Sets `tokenizer`, `max_length` and `long_documents`. `train`: the training rows."""
        arguments = self.arguments
        columns = (
            self.vocabulary_columns(train)
            if train is not None and arguments.tokenizer_type == "train"
            else []
        )
        self.tokenizer = load_tokenizer(arguments, columns, notes)
        self.tokenizer.truncation_side = arguments.truncation_side
        self.prepare_tokenizer(self.tokenizer)
        self.max_length = choose_max_length(
            arguments.max_length, self.encoder_config(), self.tokenizer, self.default_max_length
        )
        self.long_documents = LongDocuments.of(arguments, self.config, self.tokenizer, self.max_length)

    def _choose_kernels(self, notes: list[str]) -> None:
        """Sets BigBird's kind of attention and `collator`. Raises `InputError`."""
        arguments, encoder = self.arguments, self.encoder_config()
        note = choose_attention(encoder, self.max_length)
        notes += [note] if note else []
        if arguments.padding_free:
            check_padding_free(
                kernels=arguments.kernels,
                config=encoder,
                device_type=self.launch.device_type,
                padding_side=self.tokenizer.padding_side,
            )
        self.collator = TextCollator(
            self.tokenizer, padding_of(encoder), self.long_documents, self.extra_inputs, self.target_tensor
        )

    def read_files(self, modes: Modes, notes: list[str]) -> tuple[dict[str, Table], dict[str, Any]]:
        """(tables, targets), by split (`read_tables`)."""
        arguments, columns = self.arguments, self.target_columns()
        streamed = arguments.streaming and modes.train
        self.buffers = Buffers(arguments, (arguments.text_column, *columns)) if streamed else None
        return read_tables(arguments, modes, columns, self.read_targets, notes, self.buffers)

    def buffer_split(self, table: Table) -> TextSplit:
        """Tokenizes the rows of a later buffer. Raises `InputError`."""
        notes = []  # not shown; the notes on the first buffer are
        texts_of(table, self.arguments.text_column)
        targets = self.encode_targets(table, self.read_targets(table, "train", notes), notes)
        return self._split("train", table, targets, tokenizer_fingerprint(self.tokenizer), notes)

    def _first_buffer_cache(self, name: str) -> AbstractContextManager[None]:
        """A context in which the tokens of a streamed split are cached with its first buffer."""
        return self.buffers.cached_with(0) if self.buffers is not None and name == "train" else nullcontext()

    def _split(
        self, name: str, table: Table, targets: Ragged | None, tokenizer: str, notes: list[str]
    ) -> TextSplit:
        """Tokenizes a file's texts and notes how many were cut. `tokenizer`: its fingerprint."""
        arguments = self.arguments
        if name == "test":
            check_ids(table, arguments.id_column)
        texts = table.columns[arguments.text_column]
        settings = f"{tokenizer} {self.max_length}"
        settings += f" {self.source_prefix!r}" if self.source_prefix else ""
        settings = " ".join([settings, *map(str, self.long_documents.fingerprint().values())])
        encoded = encode_cached(texts, self.encoder, settings, arguments.preprocessing_num_workers)
        note_unknown(encoded["input_ids"], self.tokenizer, table.path, notes)
        note_cut(table, "texts", encoded["cut"], self.long_documents.limit, notes)
        if name != "train":  # blank training rows were dropped
            note_blank(table, texts, notes)
        return self.collator.split(
            table.path,
            texts,
            encoded["input_ids"],
            targets,
            self.titles_of(table),
            ids=ids_of(table, arguments.id_column),
            mixture=mixture_of(table, arguments.mixing_weights, notes) if name == "train" else None,
            weights=self.sampling_weights(targets) if name == "train" else None,
            where=table.where if table.sources else None,
        )

    @property
    def encoder(self) -> Callable[[list[str]], dict[str, list]]:
        """Texts -> ids, and whether each text was cut."""
        return self.long_documents.encoder(self.tokenizer, self.source_prefix)

    def rows_in_memory(self, items: Sequence[str]) -> TextSplit:
        texts = check_texts(items)
        return self.collator.split("texts", texts, Ragged.of(self.encoder(texts)["input_ids"]), None)

    def explain(self, model: torch.nn.Module, item: str, line: dict[str, Any]) -> dict[str, Any]:
        """For a classifier: its thresholds, and the contributions of the first `max_length` tokens' words to
        the likeliest labels."""
        if "probabilities" not in line:
            return {}
        encoded = self.tokenizer(
            item,
            truncation=True,
            max_length=self.max_length,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        words = words_of_likeliest(
            model, encoded, line["probabilities"], self.long_documents.method == "windows"
        )
        return {
            "thresholds": dict(zip(line["probabilities"], map(float, self.thresholds), strict=True)),
            "words": words,
        }

    def titles_of(self, table: Table) -> Cells | None:
        """The reference titles of a file, for title generation."""
        return None

    def _fingerprint(self, tokenizer: str) -> dict[str, Any]:
        """The run's fingerprint (`Data.fingerprint`). `tokenizer`: the tokenizer's."""
        trained = {name: split for name, split in self.splits.items() if name != "test"}
        configuration, weights = self.arguments.config_name, self.arguments.model_name_or_path
        return {
            "task": self.name,
            "model": model_content(
                configuration or weights, None if self.arguments.from_scratch else weights
            ),
            **self.task_fingerprint(),
            **adapters.fingerprint(self.arguments),
            "tokenizer": tokenizer[:16],
            "max_length": self.max_length,
            **self.long_documents.fingerprint(),
            **({} if self.buffers is None else {"stream": self.buffers.fingerprint}),
            **mixing_fingerprint(self.splits),
            **{f"{name}_rows": len(split) for name, split in trained.items()},
            **{f"{name}_content": split.content()[:16] for name, split in trained.items()},
        }

    def task_fingerprint(self) -> dict[str, Any]:
        """The task's entries of the run's fingerprint."""
        return {}

    def load_for_prediction(self, auto_class: Any, path: str | Path) -> tuple[torch.nn.Module, set[str]]:
        """(model of a folder or of the hub, names of its parameters without trained weights)."""
        arguments = replace(
            self.arguments, model_name_or_path=str(path), config_name=None, from_scratch=False
        )
        named = str(path) == self.arguments.model_name_or_path
        return load_model_and_new_names(
            auto_class, arguments, self.config if named else load_config(arguments)
        )

    def learning_rate_scale(self, model: torch.nn.Module, parameter: str) -> float:
        decay = self.arguments.layerwise_lr_decay
        if decay is None or ".decoder." in f".{parameter}":
            return 1.0
        return adapters.layerwise_scale(parameter, self.encoder_config().num_hidden_layers, decay)

    @property
    def rounding(self) -> str:
        """The precision that limits how well best/ agrees with the trained model."""
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
        """Writes best/. `plain`: a model of the trained `model`'s class on the meta device, with the
        configuration to export; `change`: applied to the weights before saving."""
        exported, weights = adapters.to_export(model, plain, weights, self.arguments)
        weights = weights if change is None else change(weights)
        export_model(path, exported, weights, check, self.tokenizer, self.max_length)

    @property
    def limits(self) -> list[str]:
        """Sentences for the model card."""
        return [f"Texts are cut to {self.long_documents.limit} tokens."]

    def with_kernels(self, model: torch.nn.Module) -> torch.nn.Module:
        """Checks the vocabulary, enables the kernels of the arguments, and applies --long_documents to the
        model."""
        check_vocabulary(model, self.tokenizer)
        arguments = self.arguments
        enable_kernels(
            model,
            kernels=arguments.kernels,
            padding_free=arguments.padding_free,
            on_cpu=self.launch.device_type == "cpu",
        )
        return self.long_documents.prepare(model, self.tokenizer.padding_side)
