"""Batches: a process's micro-batches by optimizer step, and the batches of a file that is evaluated."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from finetune.batching.order import epoch_order, evaluation_batches, mixed_rows, share_out, share_out_tokens
from finetune.errors import InputError, TrainingError, in_short
from finetune.launching.signals import ignore_signals
from finetune.plan import Plan
from finetune.task import Batch, Split

Collate = Callable[[np.ndarray], Batch]


@dataclass(frozen=True)
class EpochRows:
    """The rows of an epoch, their `lengths` and `widths`, (rows,), and the `order` in which they are trained on."""

    split: Split
    lengths: np.ndarray
    widths: np.ndarray
    order: np.ndarray


class TrainSteps(Dataset):
    """Optimizer step -> this process's micro-batches; a function of (seed, step), so a run can resume at any step."""

    def __init__(
        self, split: Split, plan: Plan, rank: int, seed: int, length_grouping: bool, padding_free: bool = False
    ) -> None:
        """`padding_free`: the model computes on a batch's tokens without its padding."""
        self.split, self.plan, self.rank, self.padding_free = split, plan, rank, padding_free
        self.has_tokens = split.lengths is not None
        self._entered: int | None = None  # the epoch of a stream that the training is in
        # Buffers of a stream are on the disk as long as they are known here.
        known = 2 if split.stream is None else 1
        self._epoch = lru_cache(maxsize=known)(partial(self._make_epoch, seed, length_grouping and self.has_tokens))

    def _make_epoch(self, seed: int, length_grouping: bool, epoch: int) -> EpochRows:
        split = self.split if self.split.stream is None or epoch == 0 else self.split.stream.split(epoch)
        lengths, size, mixture, weights = row_lengths_of(split), self.plan.batch.global_batch_size, split.mixture, split.weights
        if mixture is None:
            order = epoch_order(seed, epoch, lengths, size, length_grouping, weights)
        else:
            rows = mixed_rows(seed, epoch, mixture.source, mixture.counts)
            theirs = None if weights is None else weights[rows]
            order = rows[epoch_order(seed, epoch, lengths[rows], size, length_grouping, theirs)]
        return EpochRows(split, lengths, widths_of(split), order)

    def _epoch_at(self, step: int) -> EpochRows:
        return self._epoch(self.plan.epoch_of(step)[0])

    def begin(self, step: int, start: Any) -> None:
        """The training will begin with optimizer step `step`. `start`: `start_at` that step, as the checkpoint has it."""
        if self.split.stream is not None:
            self.split.stream.begin(self.plan.epoch_of(step)[0], start)

    def enter(self, step: int) -> None:
        """The training is at optimizer step `step`: a stream reads the rows after those of its epoch."""
        epoch, last = self.plan.epoch_of(step)[0], self.plan.epoch_of(self.plan.total_steps - 1)[0]
        if self.split.stream is not None and epoch != self._entered:
            self._entered = epoch
            self._epoch(epoch)
            self.split.stream.enter(epoch, epoch == last)

    def start_at(self, step: int) -> Any:
        """Where a stream's rows of the epoch of optimizer step `step` begin, for a checkpoint; None for other rows."""
        return None if self.split.stream is None else self.split.stream.start_of(self.plan.epoch_of(step)[0])

    def close(self) -> None:
        """The training is done."""
        if self.split.stream is not None:
            self.split.stream.close()

    def rows(self, step: int) -> np.ndarray:
        """The rows of the whole global batch of optimizer step `step` (0-based)."""
        position, size = self.plan.epoch_of(step)[1], self.plan.batch.global_batch_size
        return self._epoch_at(step).order[position * size : (position + 1) * size]

    def __len__(self) -> int:
        return self.plan.total_steps

    def shares(self, step: int) -> list[list[np.ndarray]]:
        """[micro-batch][process] -> rows of optimizer step `step`."""
        batch, rows, epoch = self.plan.batch, self.rows(step), self._epoch_at(step)
        if batch.max_tokens is not None:
            return share_out_tokens(rows, epoch.widths, batch.world_size, batch.max_tokens, self.padding_free)
        return share_out(rows, epoch.lengths, batch.world_size, batch.accumulation)

    def tokens(self, step: int) -> tuple[int | None, int | None]:
        """Tokens of the global batch of optimizer step `step`, without and with padding; None where rows have none."""
        if not self.has_tokens:
            return None, None
        epoch = self._epoch_at(step)
        tokens = int(epoch.lengths[self.rows(step)].sum())
        if self.padding_free:
            return tokens, tokens
        padded = sum(len(share) * int(epoch.widths[share].max()) for each in self.shares(step) for share in each if len(share))
        return tokens, padded

    def largest_micro_batch(self) -> Batch:
        """A micro-batch as large as any of the run: as many rows as one may have, the longest of the file, or of the first
        buffer of a stream."""
        batch, lengths = self.plan.batch, row_lengths_of(self.split)
        size = min(batch.micro_batch_size, len(lengths))
        if batch.max_tokens is not None:
            size = min(size, max(1, batch.max_tokens // int(widths_of(self.split).max())))
        longest = np.argpartition(-lengths, size - 1)[:size]
        return self.split.collate(longest[np.argsort(-lengths[longest], kind="stable")])

    def __getitem__(self, step: int) -> list[Batch]:
        rows, split = self.rows(step), self._epoch_at(step).split
        collate = split.collate
        if split.augment is not None:
            collate = partial(split.augment, epoch=self.plan.epoch_of(step)[0])
        return [collate_share(collate, share[self.rank], rows) for share in self.shares(step)]


def collate_share(collate: Collate, rows: np.ndarray, others: np.ndarray) -> Batch:
    """Collates a share; an empty one becomes a placeholder: the shape of another row, counted for nothing."""
    if len(rows):
        return collate(rows)
    batch = collate(others[-1:])
    return replace(batch, rows=torch.full_like(batch.rows, -1))


def train_loader(steps: TrainSteps, first_step: int, num_workers: int, pin_memory: bool) -> Iterable[list[Batch]]:
    """Iterates over the micro-batches of the steps from `first_step` on. Raises `InputError` for rows that cannot be read, and
    `TrainingError` if a worker is gone."""
    context = "fork" if num_workers else None
    loader = DataLoader(
        _WithoutTracebacks(steps) if num_workers else steps,
        batch_size=None,
        sampler=range(first_step, len(steps)),
        num_workers=num_workers,
        pin_memory=pin_memory,
        multiprocessing_context=context,
        worker_init_fn=_start_worker,
    )
    return _surviving_its_workers(loader) if num_workers else loader


def _start_worker(_worker: int) -> None:
    """Lets a worker die that cannot hand a batch over: its queue would print why and drop the batch, and the run would wait for
    it for ever."""
    ignore_signals()
    Queue._on_queue_feeder_error = staticmethod(_end_worker)


def _end_worker(error: Exception, _batch: object) -> None:
    print(f"a batch cannot be handed over: {in_short(error)}", file=sys.stderr, flush=True)
    os._exit(1)


class _WithoutTracebacks(Dataset):
    """Returns an `InputError` instead of raising it: torch would raise it anew with the worker's traceback for its message."""

    def __init__(self, steps: TrainSteps) -> None:
        self.steps = steps

    def __getitem__(self, step: int) -> list[Batch] | InputError:
        try:
            return self.steps[step]
        except InputError as error:
            return error


def _surviving_its_workers(loader: DataLoader) -> Iterator[list[Batch]]:
    """torch's handler of SIGCHLD raises wherever the main thread happens to be once a worker dies, also while the run writes
    how it ended. Without it the loader looks every few seconds whether the worker that it waits for is alive."""
    batches = iter(loader)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        for found in batches:
            if isinstance(found, InputError):
                raise found
            yield found
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise TrainingError(
            f"a process that prepares batches is gone: {in_short(error)}. It was killed, perhaps for want of memory, or "
            "/dev/shm is too small (docker run --shm-size); try fewer --dataloader_num_workers"
        ) from error


@dataclass(frozen=True)
class EvalRows:
    """A file to be evaluated, and how much of it at a time: `batch_size` rows or, where it is given, `max_tokens` tokens."""

    split: Split
    batch_size: int
    max_tokens: int | None = None

    def __len__(self) -> int:
        return len(self.split)

    def batches(self, world_size: int, rank: int, first: int = 0) -> Iterable[Batch]:
        """This process's batches from number `first` on; every process gets the same number."""
        everything = np.arange(len(self))
        for rows in self._shares(world_size, rank)[first:]:
            yield collate_share(self.split.collate, rows, everything)

    def rounds(self, world_size: int) -> int:
        """How many batches each process gets."""
        return len(self._shares(world_size, 0))

    def _shares(self, world_size: int, rank: int) -> list[np.ndarray]:
        max_tokens = None if self.split.lengths is None else self.max_tokens
        return evaluation_batches(widths_of(self.split), self.batch_size, max_tokens, world_size, rank)


def row_lengths_of(split: Split) -> np.ndarray:
    """(rows,) the tokens of each row; 1 where rows have none."""
    return np.ones(len(split), dtype=np.int64) if split.lengths is None else split.lengths


def widths_of(split: Split) -> np.ndarray:
    """(rows,) tokens that each row would take if it were alone."""
    multiple = split.padding_multiple
    return -(-np.maximum(row_lengths_of(split), 1) // multiple) * multiple if split.widths is None else split.widths
