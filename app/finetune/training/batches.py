"""Rows of tokens -> batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from finetune.launching.signals import ignore_signals
from finetune.plan import Plan
from finetune.reading.ragged import Ragged
from finetune.task import Batch
from finetune.training.order import epoch_order, evaluation_batches, share_out, share_out_tokens

Collate = Callable[[np.ndarray], Batch]


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
