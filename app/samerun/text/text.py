"""What text tasks share: reading, tokenizing, batches of token ids, and saving a model with its tokenizer."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samerun.console import say
from samerun.data.cache import content_key
from samerun.data.splits import read_needed, read_split
from samerun.data.stream import Buffers, Stream
from samerun.data.tables import (
    CellPairs,
    Cells,
    Table,
    check_ids,
    drop_blank,
    ids_of,
    is_blank,
    note_cut,
    note_repeated_texts,
    note_rows_in_quotes,
    texts_of,
    without_blank,
)
from samerun.data.tokens import Ragged, encode_cached
from samerun.embeddings import occurring_ids
from samerun.errors import InputError, described, raise_problems
from samerun.export import export_model
from samerun.kernels.bigbird import choose_attention, padding_of, use_bigbird_attention
from samerun.kernels.last_layer import use_first_token
from samerun.launch import Launch
from samerun.models import adapters
from samerun.models.pretrained import check_vocabulary, fingerprint, load_exported
from samerun.plan import Modes
from samerun.task import Batch, Data, Mixture, Split, Task, check_finite
from samerun.text.labels import Labelled
from samerun.text.long_documents import LongDocuments
from samerun.text.tokenizer import (
    IDS_ALONE,
    PairEncoder,
    choose_max_length,
    load_tokenizer,
    note_unknown,
    tokenizer_fingerprint,
)

WINDOWS_NEED = (  # limits of the model card
    "The code above needs tokenizers 0.23.3, or older than 0.23.1: the two between lose what lies beyond a "
    "window."
)
BIGBIRD_ALONE = (
    "The code above uses transformers' own BigBird. It changes to full attention for good after one short "
    "text, and a text's result depends on the padding of its batch: give it long texts, one by one."
)
IGNORED = -100  # id of a token without a loss
MOST_TOKENS = 2 * 10**8  # whose ids are looked at, which takes a second
CUT_ROWS, MUCH_LOST = 50, 1 / 3  # cut texts that are tokenized whole; share of lost tokens to tell of


@dataclass(frozen=True, kw_only=True)
class TextSplit(Split):
    """A split of texts."""

    texts: Sequence[str]
    tokens: Ragged
    targets: Ragged | None  # label ids or title token ids of each row; None for an unlabelled split
    titles: Cells | None = None
    pairs: Sequence[str] | None = None  # the second text of each row
    types: Ragged | None = None  # token types, for models that need them
    where: Callable[[int], str] | None = None  # row -> file and line, if the split has several files
    word_ids: Ragged | None = None  # of each row's tokens, for tasks whose rows are words


@dataclass(frozen=True)
class TextRows:
    """The rows of a split with their targets, which are None if the file has none."""

    table: Table
    targets: Any | None

    @property
    def path(self) -> str:
        return self.table.path

    def __len__(self) -> int:
        return len(self.table)

    def labels_of(self, row: int) -> Sequence[str]:
        return self.targets.rows[row] if isinstance(self.targets, Labelled) else ()

    def take(self, rows: np.ndarray) -> TextRows:
        return TextRows(self.table.take(rows), self.targets.take(rows))


class TextStream(Stream):
    """Streams training texts in buffers. `make_split`: (the rows of a buffer, number of rows without a text)
    -> a tokenized split."""

    def __init__(self, buffers: Buffers, make_split: Callable[[Table, int], TextSplit]) -> None:
        super().__init__(buffers.read(0)[1])
        self.buffers, self.make_split = buffers, make_split

    def read(self, epoch: int, start: Any) -> tuple[TextSplit, Any]:
        table, following, blank = self.buffers.read(epoch, start)
        with self.buffers.cached_with(epoch):
            return self.make_split(table, blank), following

    def remove(self, keeps: Callable[[int], bool]) -> None:
        self.buffers.remove(keeps)


class TextTask(Task):
    """Base class of tasks whose rows are texts.

    A task's `load` calls `read`, loads its configuration, calls `load_tokenizer`, `use_tokenizer` and
    `all_ids`, and returns `data`. A stream calls `read_targets` and `ids_of_targets` for later buffers.
    """

    input_kind = "texts"
    memory_advice = "a smaller --max_tokens_per_micro_batch or --max_length, "
    source_prefix = ""  # put before each text
    pair_column: str | None = None  # of the second text of each row
    has_types = False  # whether the model gets token types
    few_widths = False  # `coarser` padding
    buffers: Buffers | None = None  # of streamed training rows
    target_columns: tuple[str, ...]  # required in training and validation rows, beside the text

    @abstractmethod
    def read_targets(self, table: Table, split: str) -> Any | None:
        """The checked targets of a file, with a method `take(rows)`; None for a file without targets. Raises
        `InputError`."""

    @abstractmethod
    def ids_of_targets(self, table: Table, targets: Any) -> Ragged:
        """The ids of these targets. Raises `InputError`."""

    def target_tensor(self, targets: Ragged, rows: np.ndarray) -> torch.Tensor:
        """(b, ...) targets of these rows, for `Batch.labels`; here the ids of tokens."""
        return pad_rows([targets[row] for row in rows], IGNORED)

    def as_texts(self, table: Table, split: str) -> Table:
        """The table with texts in the text column, for tasks whose rows are something else. Raises
        `InputError` for cells that cannot be texts."""
        return table

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns of the texts."""
        return (self.arguments.text_column, *([] if self.pair_column is None else [self.pair_column]))

    # Reading

    def read(self, launch: Launch, modes: Modes) -> tuple[dict[str, Table], dict[str, Any]]:
        """(tables, targets), by split, of the splits that the modes need (`read_needed`). Training rows come
        from the first buffer if they are streamed; rows with blank texts are dropped. Raises `InputError`."""
        arguments, columns = self.arguments, (*self.text_columns, *self.target_columns)
        self.launch, self.modes, self.few_widths = launch, modes, launch.device_type == "cuda"
        adapters.check_quantization(arguments, launch)
        twice = [name for name, count in Counter(columns).items() if count > 1]
        if twice and (modes.train or modes.evaluate):
            raise InputError(
                f"column {twice[0]!r} is used twice; texts and targets need columns of their own"
            )
        if arguments.streaming and modes.train:
            self.buffers = Buffers(arguments, columns)
        given = arguments, modes, self.read_rows, self.notes
        rows = read_needed(*given, unit="rows", elsewhere=" or --dataset_name")
        tables = {name: each.table for name, each in rows.items()}
        return tables, {name: each.targets for name, each in rows.items()}

    def read_rows(self, split: str) -> TextRows | None:
        """The rows of a split, checked; None if the arguments name no source. Raises `InputError`."""
        arguments, required, optional = self.arguments, self.text_columns, self.target_columns
        if split != "test":  # targets of test rows are optional
            required = (*required, *optional)
        elif arguments.id_column == "id":  # the default
            optional = (*optional, "id")
        else:
            required = (*required, arguments.id_column)
        if split == "train" and self.buffers is not None:
            table = first_buffer(self.buffers, self.notes)
        else:
            table = read_split(arguments, split, required, optional)
        if table is None:
            return None
        if split == "test":
            table = without_blank(table, self.target_columns, self.notes)
        table = self.as_texts(table, split)
        if split == "train":
            table = drop_blank(table, arguments.text_column, self.notes)
        targets = self.read_targets(table, split)
        self._check_texts(table, split != "test")
        note_rows_in_quotes(table, arguments.text_column, self.notes)
        return TextRows(table, targets)

    def _check_texts(self, table: Table, needs_pairs: bool) -> None:
        """Raises `InputError` for cells that are no texts and, with `needs_pairs`, for blank second texts."""
        for column in self.text_columns:
            cells = texts_of(table, column)
            if column == self.pair_column and needs_pairs:
                blank = (row for row, text in enumerate(cells) if is_blank(text))
                advice = f"{column} is empty; give it a text or leave the row out"
                raise_problems([f"{table.where(row)}: {advice}" for row in blank])

    def all_ids(self, tables: dict[str, Table], targets: dict[str, Any]) -> dict[str, Ragged]:
        """The ids of the targets, by split, of the splits that have targets. Errors in targets are reported
        before texts are tokenized."""
        ids = {}
        for name, own in targets.items():
            if own is not None:
                with self._cached(name):
                    ids[name] = self.ids_of_targets(tables[name], own)
        return ids

    # Tokenizing

    def load_tokenizer(self, vocabulary: list[Cells]) -> Any:
        """The tokenizer; --tokenizer_type train trains it on the columns `vocabulary`."""
        tokenizer = load_tokenizer(self.arguments, vocabulary, self.notes)
        if self.modes.train or self.arguments.truncation_side != "right":  # else the exported model's own end
            tokenizer.truncation_side = self.arguments.truncation_side
            tokenizer.init_kwargs["truncation_side"] = tokenizer.truncation_side  # else it is not saved
        return tokenizer

    def use_tokenizer(self, tokenizer: Any, encoder: Any, default: int) -> None:
        """Sets `tokenizer`, its hash, `encoder_config`, `max_length`, `long_documents` and the padding of
        batches. `encoder`: the encoder's configuration; `default`: of --max_length. Raises `InputError`."""
        a, self.tokenizer, self.encoder_config = self.arguments, tokenizer, encoder
        # XLNet reads its last token. Others would read padding first, and count positions from it.
        tokenizer.padding_side = "left" if encoder.model_type == "xlnet" else "right"
        self.tokenizer_hash = tokenizer_fingerprint(tokenizer)
        self.max_length = choose_max_length(a.max_length, encoder, tokenizer, default, self.modes.train)
        self.long_documents = LongDocuments.of(a, self.config, tokenizer, self.max_length)
        self.limits = [f"Texts are cut to {self.long_documents.limit} tokens."]
        if self.pair_column is not None:
            self.limits = [f"The two texts are cut to {self.max_length} tokens, the longer one first."]
            if self.long_documents.method != "truncate":
                raise InputError(
                    f"--text_pair_column: --long_documents {self.long_documents.method} is for single texts; "
                    "give --long_documents truncate"
                )
        has_table = getattr(encoder, "type_vocab_size", 0) > 1
        self.has_types = has_table and "token_type_ids" in tokenizer.model_input_names
        if note := choose_attention(encoder, self.max_length):
            self.notes.append(note)
        self.padding_multiple = padding_of(encoder)
        if self.long_documents.method == "windows":
            self.limits.append(WINDOWS_NEED)
        if self.padding_multiple > 1:
            self.limits.append(BIGBIRD_ALONE)

    def data(self, tables: dict[str, Table], targets: dict[str, Ragged], own: dict[str, Any]) -> Data:
        """Tokenizes the texts and sets `splits`. `targets`: ids by split; `own`: the task's entries of the
        run's fingerprint."""
        self.splits = {}
        for name, table in tables.items():
            with self._cached(name):
                self.splits[name] = self._split(name, table, targets.get(name))
        if self.buffers is not None:
            stream = TextStream(self.buffers, self._split_of_buffer)
            self.splits["train"] = replace(self.splits["train"], stream=stream)
        if "train" in tables:
            tokens = int(self.splits["train"].tokens.lengths.sum())
            self.notes.insert(0, f"{len(self.splits['train'])} training rows, {tokens} tokens")
            texts = {
                name: split.texts if split.pairs is None else zip(split.texts, split.pairs, strict=True)
                for name, split in self.splits.items()
            }
            note_repeated_texts(texts, self.notes)
        return Data(self.splits, self._fingerprint(own), self.notes)

    def share_of_tokens_lost(self, texts: Sequence[str], tokens: Ragged, cut: np.ndarray) -> float:
        """The share of all tokens of `texts` that `tokens` lacks, by a sample of the rows `cut`."""
        sample = cut[:: -(-len(cut) // CUT_ROWS)].tolist() if len(cut) else []
        if not sample:
            return 0.0
        whole = self.tokenizer([texts[row] for row in sample], verbose=False, **IDS_ALONE)["input_ids"]
        kept = sum(len(tokens[row]) for row in sample)
        lost = (sum(map(len, whole)) - kept) / kept * sum(len(tokens[row]) for row in cut.tolist())
        return lost / (lost + int(tokens.lengths.sum()))

    def _split(self, name: str, table: Table, targets: Ragged | None) -> TextSplit:
        """Tokenizes a file's texts and notes how many were cut."""
        arguments, notes = self.arguments, self.notes
        if name == "test":
            check_ids(table, arguments.id_column)
        texts = table.columns[arguments.text_column]
        settings = f"{self.tokenizer_hash} {self.max_length} {self.source_prefix!r} {self.long_documents}"
        encoder = self.long_documents.encoder(self.tokenizer, self.source_prefix)
        cells, has_types = texts, False
        if self.pair_column is not None:
            encoder, has_types = PairEncoder(self.tokenizer, self.max_length, self.has_types), self.has_types
            cells, settings = CellPairs(table, self.text_columns), f"{settings} pairs {has_types}"
        encoded = encode_cached(cells, encoder, settings, arguments.preprocessing_num_workers, has_types)
        note_unknown(encoded["input_ids"], self.tokenizer, table.path, notes)
        note_cut(table, "texts", encoded["cut"], self.long_documents.limit, notes)
        if name == "train" and hasattr(arguments, "long_documents") and self.pair_column is None:
            lost = self.share_of_tokens_lost(texts, encoded["input_ids"], np.flatnonzero(encoded["cut"]))
            if lost > MUCH_LOST:
                has_windows = self.long_documents.method == "windows"
                wider = "a larger --max_length" if has_windows else "--long_documents windows"
                notes.append(f"{table.path}: about {lost:.0%} of the tokens are cut off; {wider} reads more")
        # Blank training rows were dropped; second texts are read as they are.
        if name != "train" and (blank := sum(map(is_blank, texts))):
            notes.append(
                f"{table.path}: {blank} row(s) have no text; they are kept and read as an empty text"
            )
        return self.make_split(
            table.path,
            texts,
            encoded["input_ids"],
            targets,
            titles=table.columns.get(getattr(arguments, "title_column", None)),
            pairs=table.columns.get(self.pair_column),
            types=encoded["token_type_ids"],
            word_ids=encoded.get("word_ids"),
            ids=ids_of(table, arguments.id_column),
            mixture=mixture_of(table, arguments.mixing_weights, notes) if name == "train" else None,
            where=table.where if table.sources else None,
        )

    def make_split(
        self, path: str, texts: Sequence[str], tokens: Ragged, targets: Ragged | None, **more: Any
    ) -> TextSplit:
        """The split of these texts. `path`: name in messages; `more`: further fields of `TextSplit`."""
        lengths = tokens.lengths.astype(np.int64)
        split = TextSplit(
            path=path,
            collate=self.collate,  # replaced below: it needs the split, too
            num_rows=len(texts),
            labelled=targets is not None,
            lengths=lengths,
            padding_multiple=self.padding_multiple,
            widths=self.long_documents.widths(lengths, self.padding_multiple),
            texts=texts,
            tokens=tokens,
            targets=targets,
            **more,
        )
        return replace(split, collate=partial(self.collate, split), content=partial(_content, split))

    def _split_of_buffer(self, table: Table, blank: int) -> TextSplit:
        """Tokenizes the rows of a later buffer. Prints notes of a kind that there was not before. Raises
        `InputError`."""
        before = len(self.notes)
        kinds = {_without_numbers(note) for note in self.notes if ", buffer " in note}
        if blank:
            self.notes.append(f"{table.path}: {blank} row(s) without a text left out")
        table = self.as_texts(table, "train")
        self._check_texts(table, True)
        targets = self.ids_of_targets(table, self.read_targets(table, "train"))
        split = self._split("train", table, targets)
        self.notes[before:] = [note for note in self.notes[before:] if _without_numbers(note) not in kinds]
        if self.launch.rank == 0:
            say(*(f"note           {note}" for note in self.notes[before:]))
        return split

    def _cached(self, name: str) -> AbstractContextManager[None]:
        """A context in which the tokens of a streamed split are cached with its first buffer."""
        return self.buffers.cached_with(0) if self.buffers is not None and name == "train" else nullcontext()

    def _fingerprint(self, own: dict[str, Any]) -> dict[str, Any]:
        """The run's fingerprint (`Data.fingerprint`)."""
        return {
            **fingerprint(self.arguments, self.splits),
            **own,
            "tokenizer": self.tokenizer_hash[:16],
            "max_length": self.max_length,
            **self.long_documents.fingerprint(),
            **({} if self.buffers is None else {"stream": self.buffers.fingerprint}),
        }

    # Batches

    def collate(self, split: TextSplit, rows: np.ndarray) -> Batch:
        """Pads ids, mask and token types to the longest row and to the multiple: (b, width), or with windows
        (b, windows, width)."""
        tokenizer, ids = self.tokenizer, [split.tokens[row] for row in rows]
        side = tokenizer.padding_side
        pieces, windows = self.long_documents.pieces(ids)
        multiple = self.padding_multiple
        if self.few_widths:
            multiple = coarser(multiple, max(map(len, pieces)), self.max_length)
        inputs = {
            "input_ids": pad_rows(pieces, tokenizer.pad_token_id, side, multiple),
            "attention_mask": pad_rows([np.ones_like(row) for row in pieces], 0, side, multiple),
        }
        if split.types is not None:
            inputs["token_type_ids"] = pad_rows([split.types[row] for row in rows], 0, side, multiple)
        lengths = lengths_of(ids, side)
        if windows is not None:
            inputs = {name: tensor.unflatten(0, (len(rows), windows)) for name, tensor in inputs.items()}
            lengths = tuple(map(len, ids))
        labels = None if split.targets is None else self.target_tensor(split.targets, rows)
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels, lengths)

    @property
    def reads_pairs(self) -> bool:
        """Whether a row has two texts."""
        return self.pair_column is not None

    def rows_in_memory(self, items: Sequence[str | tuple[str, str]]) -> TextSplit:
        """`items`: texts, or pairs of texts for a model that reads pairs."""
        for number, item in enumerate(items):
            is_pair = isinstance(item, tuple | list) and list(map(type, item)) == [str, str]
            if not (is_pair if self.reads_pairs else isinstance(item, str)):
                advice = "one text, without a text_pair"
                if self.reads_pairs:
                    advice = "a text and a text_pair (--text_pair)"
                raise InputError(f"text {number} is {described(item)}: the model reads {advice}")
            try:
                "".join(item).encode()
            except UnicodeEncodeError:
                raise InputError(
                    f"text {number}: holds half of a character (a lone surrogate): remove or complete it"
                ) from None
        if not self.reads_pairs:
            texts, encode = list(items), self.long_documents.encoder(self.tokenizer, self.source_prefix)
            encoded = {name: Ragged.of(rows) for name, rows in encode(texts).items() if name != "cut"}
            return self.make_split("texts", texts, encoded.pop("input_ids"), None, **encoded)
        texts, pairs = (list(column) for column in zip(*items, strict=True))
        encoded = PairEncoder(self.tokenizer, self.max_length, self.has_types)(texts, pairs)
        types = Ragged.of(encoded["token_type_ids"]) if self.has_types else None
        tokens = Ragged.of(encoded["input_ids"])
        return self.make_split("texts", texts, tokens, None, pairs=pairs, types=types)

    # The model

    def load_for_prediction(self, auto_class: Any, path: str | Path, has_head: bool) -> torch.nn.Module:
        """The model of a folder or of the hub (`load_exported`)."""
        config = self.config if str(path) == self.arguments.model_name_or_path else None
        return load_exported(auto_class, self.arguments, path, has_head, config)

    def with_kernels(self, model: torch.nn.Module) -> torch.nn.Module:
        """Checks the vocabulary, and applies our kernels and --long_documents to the model."""
        check_vocabulary(model, self.tokenizer)
        if self.arguments.layerwise_lr_decay is not None:
            decoder = {name for name, _ in model.named_parameters() if ".decoder." in f".{name}"}
            kind, layers = self.encoder_config.model_type, self.encoder_config.num_hidden_layers
            if adapters.numbered_layers(model, decoder) != layers:
                raise InputError(
                    f"--layerwise_lr_decay: a model of type {kind} has no numbered row of {layers} layers"
                )
        use_bigbird_attention(model)
        if self.launch.use_cpu:
            use_first_token(model)
        return self.long_documents.prepare(model, self.tokenizer.padding_side)

    def occurring_tokens(self, model: torch.nn.Module) -> tuple[torch.nn.Embedding, np.ndarray] | None:
        splits = [split for name, split in self.splits.items() if name != "test"]
        tokens = sum(int(split.lengths.sum()) for split in splits)
        if not self.launch.use_cpu or self.buffers is not None or tokens > MOST_TOKENS:
            return None  # it has not run on a GPU
        parts = [values[ends[0] : ends[-1]] for split in splits for values, ends in split.tokens.chunks]
        embedding, tokenizer = model.get_input_embeddings(), self.tokenizer
        around = [*tokenizer.all_special_ids, *tokenizer("")["input_ids"], model.config.pad_token_id]
        return embedding, occurring_ids(parts, around, len(embedding.weight))

    def learning_rate_scale(self, model: torch.nn.Module, parameter: str) -> float:
        """By --head_learning_rate, which not every task has, and --layerwise_lr_decay."""
        rate, decay = getattr(self.arguments, "head_learning_rate", None), self.arguments.layerwise_lr_decay
        if rate and not parameter.startswith(f"{model.base_model_prefix}."):
            return rate / self.arguments.learning_rate
        if decay is None or ".decoder." in f".{parameter}":
            return 1.0
        return adapters.layerwise_scale(parameter, self.encoder_config.num_hidden_layers, decay)

    @property
    def rounding(self) -> str:
        """The precision that limits how well best/ agrees with the trained model."""
        return adapters.rounded_as(self.arguments, self.launch)

    def save_best(
        self,
        path: Path,
        model: Any,
        plain: Any,
        weights: dict[str, torch.Tensor],
        check: Callable[[Path], None],
        change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda weights: weights,
    ) -> None:
        """Writes best/. `plain`: a model of the trained `model`'s class on the meta device, with the
        configuration to export; `change`: applied to the weights before saving."""
        exported, weights = adapters.to_export(model, plain, weights, self.arguments)
        export_model(path, exported, change(weights), check, self.tokenizer, self.max_length)


def check_outputs(values: np.ndarray, what: str, split: TextSplit) -> None:
    """Raises `TrainingError` with the first row whose values, (rows, ...), are NaN or infinite."""

    def in_words(row: int) -> str:
        place = f"row {row} (0-based)" if split.where is None else split.where(row)
        return f"{place}, {split.texts[row]!r:.60}"

    check_finite(values, what, split.path, "rows", in_words)


def _without_numbers(note: str) -> str:
    """What a note says, whatever file and numbers it is about."""
    return re.sub(r"[\d.,]+", "", note.rpartition(": ")[2])


def first_buffer(buffers: Buffers, notes: list[str]) -> Table:
    """The rows of the first buffer of a stream, with notes on what it stands for."""
    requested = buffers.size
    table, _, blank = buffers.read(0)
    if len(table) < requested:
        notes.append(
            f"there are {len(table)} training rows with a text, fewer than a buffer of {requested}: "
            "every buffer has all of them (--streaming)"
        )
    notes.append(
        f"an epoch is a buffer of {len(table)} training rows (--streaming); labels, means of numbers, tokens "
        "and memory are those of the first"
    )
    if blank:
        notes.append(f"{table.path}: {blank} row(s) without a text left out")
    return table


def mixture_of(table: Table, weights: Sequence[float] | None, notes: list[str]) -> Mixture | None:
    """The `Mixture` of a table's files by --mixing_weights; None without weights."""
    if weights is None:
        return None
    numbers = [source.argument for source in table.sources]
    paths = [table.sources[numbers.index(number)].path for number in range(len(weights))]
    return Mixture.of(np.array(numbers)[table.source], weights, paths, notes)


def pad_rows(
    rows: Sequence[np.ndarray], pad_value: int, side: str = "right", multiple: int = 1
) -> torch.Tensor:
    """(b, width) int64 padded rows. The width is the longest length, at least 1, rounded up to `multiple`."""
    width = -(-max(1, *(len(row) for row in rows)) // multiple) * multiple
    padded = np.full((len(rows), width), pad_value, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        if side == "right":
            target[: len(row)] = row
        else:
            target[width - len(row) :] = row
    return torch.from_numpy(padded)


def coarser(multiple: int, longest: int, most: int) -> int:
    """A multiple that leaves few widths, for at most an eighth more of them: on a GPU a kernel may be chosen,
    and a graph recorded, for each. `most`: the greatest length that a model may read."""
    step = max(8, 2 ** (longest.bit_length() - 4))
    if step % multiple:
        return multiple
    return step if -(-longest // step) * step <= most else max(multiple, most)


def lengths_of(rows: Sequence[np.ndarray], side: str) -> tuple[int, ...] | None:
    """`Batch.lengths` of rows padded on the right; None if they are padded on the left or a row is empty."""
    lengths = tuple(map(len, rows))
    return lengths if side == "right" and min(lengths) > 0 else None


def _content(split: TextSplit) -> str:
    """A hash of a split's texts and targets."""
    if split.titles is not None:
        return content_key([split.texts.content_key, split.titles.content_key])
    targets, pairs = split.targets, split.pairs
    labels = [] if targets is None else [targets.values.tobytes(), targets.offsets.tobytes()]
    seconds = [] if pairs is None else [pairs.content_key]
    return content_key([split.texts.content_key, *seconds, *labels])
