"""Rows -> tokens -> batches. Level 3.

Tokens are made once per (texts, tokenizer, settings), kept on disk under that fingerprint and memory-mapped from there, so a
second start and every further process of a machine tokenize nothing.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from finetune.errors import InputError
from finetune.garbage_collection import paused
from finetune.launching.signals import ignore_signals
from finetune.plan import Plan
from finetune.reading.cache import kept
from finetune.reading.fingerprint import fingerprint
from finetune.reading.progress import progress
from finetune.reading.ragged import Ragged
from finetune.reading.stored_rows import Column
from finetune.task import Batch, Split
from finetune.training.order import epoch_order, evaluation_batches, share_out, share_out_tokens

Encode = Callable[[list[str]], dict[str, list]]
Collate = Callable[[np.ndarray], Batch]
FORM = "2"  # of the tokens kept; another one tokenizes again
IDS = "ids.int32"
PIECE = 1000  # texts tokenized at a time


def encode_cached(texts: Column, encode: Encode, settings: str, num_proc: int | None = None) -> dict[str, Any]:
    """Tokenizes `texts` or finds their tokens on disk.

    `encode` turns a list of texts into columns: "input_ids" (a list of ids per text) and "cut" (whether it lost its end).
    `settings` names everything that its result depends on. Returns {"input_ids": Ragged, "cut": (rows,) bool, "content": the
    fingerprint of the texts}, mapped from the disk.
    """
    content = texts.fingerprint
    folder = kept("tokens", fingerprint([FORM, settings, content])[:40], lambda path: _encode_to(path, texts, encode, num_proc))
    # As plain arrays, which are still mapped: a memmap takes longer to cut rows from.
    offsets, cut = (np.asarray(np.load(folder / name, mmap_mode="r")) for name in ("offsets.npy", "cut.npy"))
    ids = folder / IDS
    values = np.asarray(np.memmap(ids, dtype=np.int32, mode="r")) if ids.stat().st_size else np.zeros(0, np.int32)
    return {"input_ids": Ragged(values, offsets), "cut": cut, "content": content}


def _encode_to(folder: Path, texts: Column, encode: Encode, num_proc: int | None) -> None:
    folder.mkdir()
    lengths, cut = [], []
    # Collections took a fifth of the time of short texts.
    with paused(), open(folder / IDS, "wb") as file, progress("tokenizing", "texts", len(texts)) as bar:
        for encoded in _encoded(texts, encode, num_proc):
            ids = Ragged.of(encoded["input_ids"])
            file.write(ids.values.tobytes())
            lengths.append(ids.lengths)
            cut.append(np.array(encoded["cut"], dtype=bool))
            bar.update(len(ids))
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(np.concatenate(lengths), dtype=np.int64)]))
    np.save(folder / "cut.npy", np.concatenate(cut))


def _encoded(texts: Column, encode: Encode, num_proc: int | None) -> Iterator[dict[str, list]]:
    """What `encode` makes of the texts, some at a time, in order. Raises `InputError` if one of the processes is killed."""
    pieces = (list(texts[first : first + PIECE]) for first in range(0, len(texts), PIECE))
    if not num_proc or num_proc == 1:
        yield from map(encode, pieces)
        return
    # Forked, a process has the tokenizer without a copy being sent.
    with ProcessPoolExecutor(num_proc, get_context("fork"), _become_encoder, (encode,)) as pool:
        begun: deque[Future] = deque()
        try:
            for piece in pieces:
                begun.append(pool.submit(_encode, piece))
                if len(begun) > 2 * num_proc:  # what is done is written before more is read
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        except BrokenProcessPool:
            raise InputError(
                "a process that tokenizes was killed, perhaps for want of memory; give fewer --preprocessing_num_workers"
            ) from None


_encoder: Encode | None = None  # of a process that does nothing else


def _become_encoder(encode: Encode) -> None:
    global _encoder
    ignore_signals()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process is one of several
    _encoder = encode


def _encode(texts: list[str]) -> dict[str, list]:
    return _encoder(texts)


class TrainSteps(Dataset):
    """Optimizer step -> this process's micro-batches; a function of (seed, step), so a run can resume at any step."""

    def __init__(
        self, split: Split, plan: Plan, rank: int, seed: int, length_grouping: bool, padding_free: bool = False
    ) -> None:
        """`padding_free`: the model computes on a batch's tokens without its padding."""
        self.split, self.plan, self.rank, self.padding_free = split, plan, rank, padding_free
        self.has_tokens = split.lengths is not None
        self.lengths = row_lengths_of(split)
        self.widths = padded_widths(self.lengths, split.padding_multiple)
        self._order = lru_cache(maxsize=2)(partial(self._make_order, seed, length_grouping and self.has_tokens))

    def _make_order(self, seed: int, length_grouping: bool, epoch: int) -> np.ndarray:
        return epoch_order(seed, epoch, self.lengths, self.plan.batch.global_batch_size, length_grouping)

    def rows(self, step: int) -> np.ndarray:
        """The rows of the whole global batch of optimizer step `step` (0-based)."""
        epoch, position = self.plan.epoch_of(step)
        size = self.plan.batch.global_batch_size
        return self._order(epoch)[position * size : (position + 1) * size]

    def __len__(self) -> int:
        return self.plan.total_steps

    def shares(self, step: int) -> list[list[np.ndarray]]:
        """[micro-batch][process] -> rows of optimizer step `step`."""
        batch, rows = self.plan.batch, self.rows(step)
        if batch.max_tokens is not None:
            return share_out_tokens(rows, self.widths, batch.world_size, batch.max_tokens, self.padding_free)
        return share_out(rows, self.lengths, batch.world_size, batch.accumulation)

    def tokens(self, step: int) -> tuple[int, int]:
        """Tokens of the global batch of optimizer step `step`, without and with padding; (0, 0) where rows have none."""
        if not self.has_tokens:
            return 0, 0
        tokens = int(self.lengths[self.rows(step)].sum())
        if self.padding_free:
            return tokens, tokens
        padded = sum(len(share) * int(self.widths[share].max()) for each in self.shares(step) for share in each if len(share))
        return tokens, padded

    def largest_micro_batch(self) -> Batch:
        """A micro-batch as large as any of the run: as many rows as one may have, the longest of the file."""
        batch, size = self.plan.batch, min(self.plan.batch.micro_batch_size, len(self.lengths))
        if batch.max_tokens is not None:
            size = min(size, max(1, batch.max_tokens // int(self.widths.max())))
        longest = np.argpartition(-self.lengths, size - 1)[:size]
        return self.split.collate(longest[np.argsort(-self.lengths[longest], kind="stable")])

    def __getitem__(self, step: int) -> list[Batch]:
        rows = self.rows(step)
        return [collate_share(self.split.collate, share[self.rank], rows) for share in self.shares(step)]


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
    """A file to be evaluated, and how much of it at a time: `batch_size` rows or, where it is given, `max_tokens` tokens."""

    split: Split
    batch_size: int
    max_tokens: int | None = None

    def __len__(self) -> int:
        return len(self.split)

    def batches(self, world_size: int, rank: int) -> Iterable[Batch]:
        """This process's batches; every process gets the same number."""
        everything, widths = np.arange(len(self)), padded_widths(row_lengths_of(self.split), self.split.padding_multiple)
        max_tokens = None if self.split.lengths is None else self.max_tokens
        for rows in evaluation_batches(widths, self.batch_size, max_tokens, world_size, rank):
            yield collate_share(self.split.collate, rows, everything)


def row_lengths_of(split: Split) -> np.ndarray:
    """(rows,) the tokens of each row; 1 where rows have none."""
    return np.ones(len(split), dtype=np.int64) if split.lengths is None else split.lengths


def padded_widths(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """(rows,) tokens that each row would take if it were alone."""
    return -(-np.maximum(lengths, 1) // multiple) * multiple
