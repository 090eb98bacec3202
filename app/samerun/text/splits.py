"""Text splits, read from files or streamed, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from samerun.data.cache import fingerprint
from samerun.data.splits import read_splits
from samerun.data.stream import Buffers, Stream
from samerun.data.tables import Cells, Table, drop_blank, split_off, texts_of
from samerun.data.tokens import Ragged
from samerun.errors import InputError, TrainingError
from samerun.plan import Modes
from samerun.task import Batch, Mixture, Split
from samerun.text.long_documents import LongDocuments


@dataclass(frozen=True, kw_only=True)
class TextSplit(Split):
    """A split of texts. `targets`: label ids or title token ids of each row, None for an unlabelled split.
    `texts`, `titles`: columns. `where`: row number -> file and line for messages, if the split has several
    files."""

    tokens: Ragged
    targets: Ragged | None
    texts: Sequence[str]
    titles: Cells | None = None
    where: Callable[[int], str] | None = None


class TextStream(Stream):
    """Streams training texts in buffers. `make_split`: the rows of a buffer -> a tokenized split."""

    def __init__(self, buffers: Buffers, make_split: Callable[[Table], TextSplit]) -> None:
        super().__init__(buffers.read(0)[1])
        self.buffers, self.make_split = buffers, make_split

    def read(self, epoch: int, start: Any) -> tuple[TextSplit, Any]:
        table, following, _ = self.buffers.read(epoch, start)
        with self.buffers.cached_with(epoch):
            return self.make_split(table), following

    def remove(self, keeps: Callable[[int], bool]) -> None:
        self.buffers.remove(keeps)


@dataclass(frozen=True)
class TextCollator:
    """Collates tokenized texts. `multiple`: batch widths are multiples of it. `extra_inputs`: ids and mask ->
    further model inputs. `target_tensor`: (targets, row numbers) -> (b, ...)."""

    tokenizer: Any
    multiple: int
    long_documents: LongDocuments
    extra_inputs: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    target_tensor: Callable[[Any, np.ndarray], torch.Tensor]

    def split(
        self,
        path: str,
        texts: Sequence[str],
        tokens: Ragged,
        targets: Ragged | None,
        titles: Cells | None = None,
        **more: Any,
    ) -> TextSplit:
        """The split of these texts. `path`: name in messages; `more`: further fields of `TextSplit`."""
        lengths = tokens.lengths.astype(np.int64)
        return TextSplit(
            path=path,
            collate=partial(self, tokens, targets),
            num_rows=len(texts),
            labelled=targets is not None,
            lengths=lengths,
            padding_multiple=self.multiple,
            widths=self.long_documents.widths(lengths, self.multiple),
            texts=texts,
            tokens=tokens,
            targets=targets,
            titles=titles,
            content=partial(_content, texts, targets, titles),
            **more,
        )

    def __call__(self, tokens: Ragged, targets: Any, rows: np.ndarray) -> Batch:
        """Pads ids and mask to the longest row and to the multiple: (b, width), or with windows (b, windows,
        width)."""
        side, ids = self.tokenizer.padding_side, [tokens[row] for row in rows]
        pieces, windows = self.long_documents.pieces(ids)
        inputs = {
            "input_ids": pad_rows(pieces, self.tokenizer.pad_token_id, side, self.multiple),
            "attention_mask": pad_rows([np.ones_like(row) for row in pieces], 0, side, self.multiple),
        }
        inputs |= self.extra_inputs(inputs)
        lengths = lengths_of(ids, side)
        if windows is not None:
            inputs = {name: tensor.unflatten(0, (len(rows), windows)) for name, tensor in inputs.items()}
            lengths = tuple(map(len, ids))
        labels = None if targets is None else self.target_tensor(targets, rows)
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels, lengths)


def read_tables(
    arguments: Any,
    modes: Modes,
    target_columns: tuple[str, ...],
    read_targets: Callable[[Table, str, list[str]], Any],
    notes: list[str],
    buffers: Buffers | None,
) -> tuple[dict[str, Table], dict[str, Any]]:
    """(tables, targets of `read_targets`), both by split, for the splits that the modes need.

    Training rows come from the first buffer if they are streamed; rows with blank texts are dropped.
    Validation rows are split off the training rows if there is no validation file. Raises `InputError`.
    """
    text, full = (arguments.text_column,), (arguments.text_column, *target_columns)
    required = {"train": full} if modes.train and buffers is None else {}
    required |= {"validation": full} if modes.evaluate else {}
    required |= {"test": text} if modes.predict else {}  # targets of test rows are optional
    tables = read_splits(arguments, required, "train" in required, optional=target_columns)
    if buffers is not None:
        tables = {"train": _first_buffer(buffers, notes), **tables}
    if modes.train:
        tables["train"] = drop_blank(tables["train"], arguments.text_column, notes)
    targets = {name: read_targets(table, name, notes) for name, table in tables.items()}
    if modes.train and modes.evaluate and "validation" not in tables:
        parts = split_off(tables["train"], arguments.validation_split, arguments.seed)
        table, train_targets = tables["train"], targets["train"]
        for name, rows in zip(("train", "validation"), parts, strict=True):
            tables[name], targets[name] = table.take(rows), train_targets.take(rows)
        notes.append(f"{len(parts[1])} training rows are kept for validation (--validation_split)")
    for table in tables.values():
        texts_of(table, arguments.text_column)
    return tables, targets


def mixture_of(table: Table, weights: Sequence[float] | None, notes: list[str]) -> Mixture | None:
    """The `Mixture` of a table's files by --mixing_weights; None without weights."""
    if weights is None:
        return None
    numbers = [source.argument for source in table.sources]
    paths = [table.sources[numbers.index(number)].path for number in range(len(weights))]
    return Mixture.of(np.array(numbers)[table.source], weights, paths, notes)


def check_texts(items: Sequence[str]) -> list[str]:
    """The texts as a list. Raises `InputError` for a text with a lone surrogate, which no tokenizer can
    read."""
    for number, text in enumerate(items):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"text {number}: holds half of a character (a lone surrogate): remove or complete it"
            ) from None
    return list(items)


def check_finite(values: np.ndarray, what: str, split: TextSplit) -> None:
    """Raises `TrainingError` with the first row whose values are NaN or infinite. `values`: (rows, ...)."""
    wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if not len(wrong):
        return
    row, some = int(wrong[0]), len(wrong) < len(values)
    problem = f"{split.path}: the model's {what} are not finite for {len(wrong)} of {len(values)} rows"
    place = f"row {row} (0-based)" if split.where is None else split.where(row)
    example = f"first for {place}, {split.texts[row]!r:.60}"
    advice = (
        "it overflows on them: leave them out, or compute with --mixed_precision no"
        if some
        else "it diverged"
    )
    raise TrainingError(f"{problem}, {example}; {advice}. Or try a smaller --learning_rate")


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


def lengths_of(rows: Sequence[np.ndarray], side: str) -> tuple[int, ...] | None:
    """`Batch.lengths` of rows padded on the right; None if they are padded on the left or a row is empty."""
    lengths = tuple(map(len, rows))
    return lengths if side == "right" and min(lengths) > 0 else None


def _content(texts: Any, targets: Any, titles: Any) -> str:
    """A hash of a split's texts and targets."""
    if titles is not None:
        return fingerprint([texts.fingerprint, titles.fingerprint])
    labels = [] if targets is None else [targets.values.tobytes(), targets.offsets.tobytes()]
    return fingerprint([texts.fingerprint, *labels])


def _first_buffer(buffers: Buffers, notes: list[str]) -> Table:
    requested = buffers.size
    table, _, blank = buffers.read(0)
    if len(table) < requested:
        notes.append(
            f"there are {len(table)} training rows with a text, fewer than a buffer of {requested}: "
            "every buffer has all of them (--streaming_buffer_rows)"
        )
    notes.append(
        f"an epoch is a buffer of {len(table)} training rows (--streaming); labels, tokens and "
        "memory are those of the first"
    )
    if blank:
        notes.append(f"{table.path}: {blank} row(s) without a text left out, as in later buffers")
    return table
