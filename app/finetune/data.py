"""Rows -> tokens -> batches. Level 3.

Tokens are made once per (texts, tokenizer, settings), kept on disk under that fingerprint and memory-mapped from there, so a
second start and every further process of a machine tokenize nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from finetune.order import epoch_order, evaluation_batches, share_out, share_out_tokens
from finetune.plan import Plan
from finetune.stop import ignore_signals
from finetune.task import Batch

Encode = Callable[[list[str]], dict[str, list]]
Collate = Callable[[np.ndarray], Batch]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one array: row i is `values[offsets[i]:offsets[i + 1]]`, a view."""

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @staticmethod
    def of(rows: Sequence[Sequence[int]], dtype: str = "int32") -> Ragged:
        offsets = np.cumsum([0, *map(len, rows)])
        values = np.fromiter((value for row in rows for value in row), dtype=dtype, count=int(offsets[-1]))
        return Ragged(values, offsets)


def fingerprint(parts: Iterable[str | bytes]) -> str:
    """A hash over texts that knows where one ends and the next begins."""
    digest, rest = hashlib.sha256(), iter(parts)
    while some := list(islice(rest, 4096)):
        encoded = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in some]
        digest.update(np.array([len(encoded), *map(len, encoded)], dtype="<u8").tobytes())
        digest.update(b"".join(encoded))
    return digest.hexdigest()


def encode_cached(texts: list[str], encode: Encode, settings: str, num_proc: int | None = None) -> dict[str, Any]:
    """Tokenizes `texts` or finds their tokens on disk.

    `encode` turns a list of texts into columns: "input_ids" (a list of ids per text) and "cut" (whether it lost its end).
    `settings` names everything that its result depends on. Returns {"input_ids": Ragged, "cut": (rows,) bool, "content": the
    fingerprint of the texts}.
    Processes that start together wait for the first on a file lock, not in a collective: tokenizing may take longer than a
    process group waits, and machines need not share a disk.
    """
    import datasets
    from filelock import FileLock

    folder = Path(datasets.config.HF_DATASETS_CACHE) / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    content = fingerprint(texts)
    path = folder / fingerprint([settings, content])[:40]
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _encode_to(path, texts, encode, num_proc)
        table = datasets.load_from_disk(str(path)).data.table
    ids = table.column("input_ids").combine_chunks()
    values, offsets = ids.values.to_numpy(zero_copy_only=False), ids.offsets.to_numpy(zero_copy_only=False)
    return {"input_ids": Ragged(values, offsets.astype(np.int64)), "cut": table.column("cut").to_numpy(), "content": content}


def _encode_to(path: Path, texts: list[str], encode: Encode, num_proc: int | None) -> None:
    import datasets

    features = datasets.Features({"input_ids": datasets.LargeList(datasets.Value("int32")), "cut": datasets.Value("bool")})
    unfinished = path.with_suffix(f".{os.getpid()}")
    rows = datasets.Dataset.from_dict({"text": texts}, features=datasets.Features({"text": datasets.Value("large_string")}))
    was_enabled = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        encoded = rows.map(
            lambda batch: encode(batch["text"]),
            batched=True,
            remove_columns=["text"],
            features=features,
            num_proc=num_proc and min(num_proc, len(texts)),
            new_fingerprint=path.name,
        )
        encoded.flatten_indices().save_to_disk(str(unfinished))
        os.rename(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if was_enabled:
            datasets.enable_progress_bars()


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


def one_hot(labels: Ragged, rows: np.ndarray, num_labels: int) -> torch.Tensor:
    """(b, labels) float32: 1 where a row has the label."""
    dense = torch.zeros(len(rows), num_labels)
    counts = labels.offsets[rows + 1] - labels.offsets[rows]
    if counts.sum():
        dense[np.repeat(np.arange(len(rows)), counts), np.concatenate([labels[row] for row in rows])] = 1
    return dense


class TrainSteps(Dataset):
    """Optimizer step -> this process's micro-batches; a function of (seed, step), so a run can go on from any step."""

    def __init__(
        self, collate: Collate, lengths: np.ndarray, plan: Plan, rank: int, seed: int, length_grouping: bool,
        multiple: int = 1, packed: bool = False,
    ) -> None:  # fmt: skip
        """`multiple`: of what a batch's width is a multiple, as `collate` pads. `packed`: the model leaves padding out."""
        self.packed, self.collate, self.lengths, self.plan, self.rank = packed, collate, lengths, plan, rank
        self.widths = padded_widths(lengths, multiple)
        self._order = lru_cache(maxsize=2)(
            lambda epoch: epoch_order(seed, epoch, lengths, plan.batch.global_batch_size, length_grouping)
        )

    def rows(self, step: int) -> np.ndarray:
        """The rows of the whole global batch of optimizer step `step` (0-based)."""
        epoch, position = self.plan.epoch_of(step)
        size = self.plan.batch.global_batch_size
        return self._order(epoch)[position * size : (position + 1) * size]

    def __len__(self) -> int:
        return self.plan.total_steps

    def shares(self, step: int) -> list[list[np.ndarray]]:
        """[forward pass][process] -> rows of optimizer step `step`."""
        batch, rows = self.plan.batch, self.rows(step)
        if batch.max_tokens is not None:
            return share_out_tokens(rows, self.widths, batch.world_size, batch.max_tokens, self.packed)
        return share_out(rows, self.lengths, batch.world_size, batch.accumulation)

    def tokens(self, step: int) -> tuple[int, int]:
        """Tokens of the global batch of optimizer step `step`, and what padding makes of them."""
        tokens = int(self.lengths[self.rows(step)].sum())
        if self.packed:
            return tokens, tokens
        padded = sum(len(share) * int(self.widths[share].max()) for each in self.shares(step) for share in each if len(share))
        return tokens, padded

    def __getitem__(self, step: int) -> list[Batch]:
        rows = self.rows(step)
        return [collate_share(self.collate, share[self.rank], rows) for share in self.shares(step)]


def collate_share(collate: Collate, rows: np.ndarray, others: np.ndarray) -> Batch:
    """Collates a share; an empty one becomes a placeholder: the shape of another row, counted for nothing."""
    if len(rows):
        return collate(rows)
    batch = collate(others[-1:])
    return replace(batch, rows=torch.full_like(batch.rows, -1))


def train_loader(steps: TrainSteps, first_step: int, num_workers: int, pin_memory: bool) -> DataLoader:
    """Iterates over the micro-batches of the steps from `first_step` on."""
    context = "fork" if num_workers else None
    return DataLoader(
        steps,
        batch_size=None,
        sampler=range(first_step, len(steps)),
        num_workers=num_workers,
        pin_memory=pin_memory,
        multiprocessing_context=context,
        worker_init_fn=ignore_signals,
    )


@dataclass(frozen=True)
class EvalRows:
    """A file to be evaluated: how to collate its rows, how long they are, how many at a time.

    `max_tokens` takes the place of `batch_size` where it is given; `multiple`: of what a batch's width is a multiple, as
    `collate` pads.
    """

    collate: Collate
    lengths: np.ndarray
    batch_size: int
    max_tokens: int | None = None
    multiple: int = 1

    def __len__(self) -> int:
        return len(self.lengths)

    def batches(self, world_size: int, rank: int) -> Iterable[Batch]:
        """This process's batches; every process gets the same number."""
        everything, widths = np.arange(len(self.lengths)), padded_widths(self.lengths, self.multiple)
        for rows in evaluation_batches(widths, self.batch_size, self.max_tokens, world_size, rank):
            yield collate_share(self.collate, rows, everything)


def padded_widths(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """(rows,) tokens that each row would take if it were alone."""
    return -(-np.maximum(lengths, 1) // multiple) * multiple
