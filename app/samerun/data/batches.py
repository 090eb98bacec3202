"""The order of rows, the micro-batches of each optimizer step, and the batches of an evaluation.

The order and the distribution over processes are pure functions of (seed, epoch) and the lengths of the rows.
The order and the global batches do not depend on the number of processes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Dataset

from samerun.errors import InputError, TrainingError, in_short
from samerun.plan import BatchShape, Plan
from samerun.signals import ignore_signals
from samerun.task import Batch, Split

MEGABATCH = 50  # global batches; rows are sorted by length within a megabatch
# Steps that speak for an epoch. Sentences differ much in length: the mean of 200 of 449 steps was 7 % off.
SAMPLE = 2000


class Epoch(NamedTuple):
    """The training rows of an epoch."""

    split: Split
    lengths: np.ndarray  # (rows,) tokens
    widths: np.ndarray  # (rows,) tokens with padding, see `widths_of`
    order: np.ndarray  # row numbers in training order


class TrainBatches(Dataset):
    """This process's micro-batches of each optimizer step: functions of (seed, step), so a run can resume."""

    def __init__(
        self, split: Split, plan: Plan, rank: int, seed: int, length_grouping: bool, by_row: bool = False
    ) -> None:
        """`by_row`: for dropout by row, sets `Batch.places`."""
        self.split, self.plan, self.rank, self.seed = split, plan, rank, seed
        self.has_tokens, self.by_row = split.lengths is not None, by_row
        self.length_grouping = length_grouping and self.has_tokens
        self._entered: int | None = None  # current epoch of a stream
        self._epochs: dict[int, Epoch] = {}

    def _epoch_at(self, step: int) -> Epoch:
        epoch = self.plan.epoch_of(step)[0]
        if epoch not in self._epochs:
            # Two epochs are kept, one of a stream: a kept epoch would keep its buffer on the disk.
            self._epochs = dict([] if self.split.stream is not None else list(self._epochs.items())[-1:])
            self._epochs[epoch] = self._make_epoch(epoch)
        return self._epochs[epoch]

    def _make_epoch(self, epoch: int) -> Epoch:
        split = self.split if self.split.stream is None or epoch == 0 else self.split.stream.split(epoch)
        mixture, size = split.mixture, self.plan.batch.global_batch_size
        before = next((known for known in self._epochs.values() if known.split is split), None)
        lengths, widths = before[1:3] if before is not None else (row_lengths_of(split), widths_of(split))
        if mixture is None:
            order = epoch_order(self.seed, epoch, lengths, size, self.length_grouping, split.weights)
            return Epoch(split, lengths, widths, order)
        rows = mixed_rows(self.seed, epoch, mixture.source, mixture.counts)
        weights = None if split.weights is None else split.weights[rows]
        order = epoch_order(self.seed, epoch, lengths[rows], size, self.length_grouping, weights)
        return Epoch(split, lengths, widths, rows[order])

    def begin(self, step: int, start: Any) -> None:
        """Prepares a stream for training from this step on. `start`: its `start_at`, from the checkpoint."""
        if self.split.stream is not None:
            self.split.stream.begin(self.plan.epoch_of(step)[0], start)

    def enter(self, step: int) -> None:
        """Call before each optimizer step: in a new epoch, a stream starts to read the next buffer."""
        epoch, last = self.plan.epoch_of(step)[0], self.plan.epoch_of(self.plan.total_steps - 1)[0]
        if self.split.stream is not None and epoch != self._entered:
            self._entered = epoch
            self._epoch_at(step)
            self.split.stream.enter(epoch, epoch == last)

    def start_at(self, step: int) -> Any:
        """The start of this step's epoch in the stream, for a checkpoint; None without a stream."""
        return None if self.split.stream is None else self.split.stream.start_of(self.plan.epoch_of(step)[0])

    def close(self) -> None:
        if self.split.stream is not None:
            self.split.stream.close()

    def rows(self, step: int) -> np.ndarray:
        """(rows,) int64: the global batch of optimizer step `step` (0-based)."""
        position, size = self.plan.epoch_of(step)[1], self.plan.batch.global_batch_size
        return self._epoch_at(step).order[position * size : (position + 1) * size].astype(np.int64)

    def __len__(self) -> int:
        return self.plan.total_steps

    def shares(self, step: int) -> Shares:
        """How the rows of optimizer step `step` are divided."""
        batch, rows, epoch = self.plan.batch, self.rows(step), self._epoch_at(step)
        if batch.pass_tokens is not None:
            return share_out_cheaply(rows, epoch.widths, batch)
        if batch.max_tokens is not None:
            return share_out_tokens(rows, epoch.widths, batch.world_size, batch.max_tokens)
        return share_out(rows, epoch.lengths, batch.world_size, batch.accumulation)

    def tokens(self, step: int) -> tuple[int | None, int | None]:
        """(tokens, tokens with padding) of the global batch of this step; Nones for data without tokens."""
        if not self.has_tokens:
            return None, None
        epoch = self._epoch_at(step)
        tokens = int(epoch.lengths[self.rows(step)].sum())
        return tokens, self.shares(step).padded_tokens(epoch.widths)

    def work(self, step: int) -> int:
        """What the seconds of this step are in proportion to: its tokens with padding, or its rows."""
        return self.tokens(step)[1] or len(self.rows(step))

    def mean_work(self, step: int = 0) -> float:
        """The mean `work` of `sample`."""
        return float(np.mean([self.work(each) for each in self.sample(step)]))

    def sample(self, step: int = 0) -> list[int]:
        """The steps in the epoch of `step`; in a longer one SAMPLE of them, the middles of equal parts."""
        number, first = self.plan.steps_per_epoch, step - self.plan.epoch_of(step)[1]
        parts = min(number, SAMPLE)
        return [first + (2 * part + 1) * number // (2 * parts) for part in range(parts)]

    def largest_micro_batch(self) -> Batch:
        """A micro-batch of maximal size: the longest rows of the file, or of the first buffer of a stream."""
        batch, lengths = self.plan.batch, row_lengths_of(self.split)
        size = min(batch.micro_batch_size, len(lengths))
        if batch.max_tokens is not None:
            size = min(size, max(1, batch.max_tokens // int(widths_of(self.split).max())))
        longest = np.argpartition(-lengths, size - 1)[:size]
        rows = longest[np.argsort(-lengths[longest], kind="stable")]
        return self._with_places(self.split.collate(rows), np.arange(size))

    def __getitem__(self, step: int) -> list[Batch]:
        rows, split = self.rows(step), self._epoch_at(step).split
        collate = split.collate
        if split.augment is not None:
            collate = partial(split.augment, epoch=self.plan.epoch_of(step)[0])
        shares = self.shares(step)
        # places[i]: the position in the global batch of the row shares.rows[i]. Both have the same rows in
        # different orders; a row that was drawn twice is in both twice.
        places = np.empty_like(shares.rows)
        places[np.argsort(shares.rows, kind="stable")] = np.argsort(rows, kind="stable")
        own = [(shares.rows[share], places[share]) for share in shares.of(self.rank)]
        return [self._with_places(collate_share(collate, part, rows), at) for part, at in own]

    def _with_places(self, batch: Batch, places: np.ndarray) -> Batch:
        """`places`: empty for a placeholder."""
        return replace(batch, places=tuple(places.tolist()) or (0,)) if self.by_row else batch


def collate_share(collate: Callable[[np.ndarray], Batch], rows: np.ndarray, others: np.ndarray) -> Batch:
    """Collates `rows`. If there are none, one of `others` is a placeholder: its row numbers are -1."""
    if len(rows):
        return collate(rows)
    return collate(others[-1:]).placeholder()


def train_loader(
    steps: TrainBatches, first_step: int, num_workers: int, pin_memory: bool
) -> Iterable[list[Batch]]:
    """The micro-batches of the steps from `first_step` on. Raises `InputError` for unreadable rows, and
    `TrainingError` if a worker dies."""
    loader = DataLoader(
        _WithoutTracebacks(steps) if num_workers else steps,
        batch_size=None,
        sampler=range(first_step, len(steps)),
        num_workers=num_workers,
        pin_memory=pin_memory,
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=_start_worker,
    )
    return _surviving_its_workers(loader) if num_workers else loader


def _start_worker(_worker: int) -> None:
    """Ends a worker that cannot send a batch. Its queue would drop the batch: the run would wait forever."""
    ignore_signals()
    Queue._on_queue_feeder_error = staticmethod(_end_worker)


def _end_worker(error: Exception, _batch: object) -> None:
    print(f"a batch cannot be sent to the training process: {in_short(error)}", file=sys.stderr, flush=True)
    os._exit(1)


class _WithoutTracebacks(Dataset):
    """Returns an `InputError` instead of raising it: torch would add the worker's traceback to it."""

    def __init__(self, steps: TrainBatches) -> None:
        self.steps = steps

    def __getitem__(self, step: int) -> list[Batch] | InputError:
        try:
            return self.steps[step]
        except InputError as error:
            return error


def _surviving_its_workers(loader: DataLoader) -> Iterator[list[Batch]]:
    """Iterates over the loader. Raises `TrainingError` if a worker dies.

    torch's handler of SIGCHLD is removed: it raises anywhere in the main thread, even while the run reports
    its end. Without the handler, the loader checks every few seconds whether its workers are alive.
    """
    try:
        try:
            batches = iter(loader)  # a worker may die while the others start
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for item in batches:
            if isinstance(item, InputError):
                raise item
            yield item
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise TrainingError(
            f"a data loader worker died: {in_short(error)}. It was killed, perhaps because memory ran out, "
            "or /dev/shm is too small (docker run --shm-size); try fewer --dataloader_num_workers"
        ) from error


@dataclass(frozen=True)
class EvalBatches:
    """A split to evaluate, in batches of `batch_size` rows, or of at most `max_tokens` tokens if set."""

    split: Split
    batch_size: int
    max_tokens: int | None = None

    def __len__(self) -> int:
        return len(self.split)

    def batches(self, world_size: int, rank: int, first: int = 0) -> Iterable[Batch]:
        """Yields this process's batches from index `first` on. All processes have equally many."""
        all_rows = np.arange(len(self))
        for rows in self._shares(world_size, rank)[first:]:
            yield collate_share(self.split.collate, rows, all_rows)

    def num_batches(self, world_size: int) -> int:
        """The number of batches per process."""
        return len(self._shares(world_size, 0))

    def _shares(self, world_size: int, rank: int) -> list[np.ndarray]:
        max_tokens = None if self.split.lengths is None else self.max_tokens
        return evaluation_batches(widths_of(self.split), self.batch_size, max_tokens, world_size, rank)


def row_lengths_of(split: Split) -> np.ndarray:
    """(rows,) tokens per row; ones for data without tokens."""
    return np.ones(len(split), dtype=np.int64) if split.lengths is None else split.lengths


def widths_of(split: Split) -> np.ndarray:
    """(rows,) tokens per row with the padding of a batch of that row alone."""
    if split.widths is not None:
        return split.widths
    return -(-np.maximum(row_lengths_of(split), 1) // split.padding_multiple) * split.padding_multiple


# Order and shares


def epoch_order(
    seed: int,
    epoch: int,
    lengths: np.ndarray,
    global_batch_size: int,
    length_grouping: bool,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """(rows,) the training order of an epoch; each `global_batch_size` entries are a global batch.

    Without `weights`, each row occurs once. With `weights`, (rows,), sum 1, a row of weight w occurs w * rows
    times, rounded up or down at random. With `length_grouping`, the shuffled rows are cut into megabatches of
    50 global batches. Each megabatch is sorted by length, then the global batches are shuffled: rows of a
    batch have similar lengths, but batches differ between epochs. The incomplete batch comes last. Then
    the first batch of a training contains the longest row: a job that needs too much memory fails at once.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(np.arange(len(lengths), dtype=_index_type(len(lengths))))
    if weights is not None:  # systematic sampling, which has the least variance of the counts
        ends = np.cumsum(weights[order])
        points = (np.arange(len(order)) + generator.random()) / len(order) * ends[-1]
        order = generator.permutation(order[np.searchsorted(ends[:-1], points, side="right")])
    if not length_grouping or len(lengths) <= global_batch_size:
        return order
    # Small files get at least four shorter megabatches: a single one would have the same batches in each
    # epoch.
    size = global_batch_size * max(1, min(len(lengths) // (4 * global_batch_size), MEGABATCH))
    megabatches = [order[start : start + size] for start in range(0, len(order), size)]
    order = np.concatenate([rows[np.argsort(-lengths[rows], kind="stable")] for rows in megabatches])
    full = len(order) // global_batch_size
    batches = order[: full * global_batch_size].reshape(full, global_batch_size)
    batches = batches[generator.permutation(full)]
    if epoch == 0:
        longest = int(lengths[batches].max(axis=1).argmax())
        batches[[0, longest]] = batches[[longest, 0]]
    order = np.concatenate([batches.reshape(-1), order[full * global_batch_size :]])
    if epoch == 0:
        # Still outside the first batch if it is in the incomplete batch.
        longest = int(lengths[order].argmax())
        if longest >= global_batch_size:
            order[[0, longest]] = order[[longest, 0]]
    return order


def mixed_rows(seed: int, epoch: int, source: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(counts.sum(),) int64: the rows of an epoch of a mixture by source, which `epoch_order` shuffles.

    `source`: (rows,) index of each row's source; `counts`: (sources,) rows of each source in an epoch. An
    endless sequence of shuffled passes over a source is cut into epochs, so no row repeats before all other
    rows of its source were used.
    """
    parts = []
    for number, count in enumerate(counts.tolist()):
        if not count:
            continue
        rows, first = np.flatnonzero(source == number), epoch * count
        passes = range(first // len(rows), (first + count - 1) // len(rows) + 1)
        shuffled = [np.random.default_rng([seed, number, index]).permutation(rows) for index in passes]
        begin = first - passes.start * len(rows)
        parts.append(np.concatenate(shuffled)[begin : begin + count])
    return np.concatenate(parts)


class Shares(NamedTuple):
    """Rows in shares. Share i is of process i % world_size in micro-batch i // world_size."""

    rows: np.ndarray  # (rows,) from long to short
    bounds: np.ndarray  # (shares + 1,) share i is rows[bounds[i]:bounds[i + 1]]
    world_size: int

    def of(self, rank: int) -> list[slice]:
        """A process's share of each micro-batch, as places in `rows`; some may be empty."""
        starts, ends = self.bounds[rank : -1 : self.world_size], self.bounds[rank + 1 :: self.world_size]
        return list(map(slice, starts.tolist(), ends.tolist()))

    def padded_tokens(self, widths: np.ndarray) -> int:
        """The tokens of all shares, each padded to its widest row. `widths`: (rows of the file,)"""
        counts = np.diff(self.bounds)
        widest = np.maximum.reduceat(widths[self.rows], self.bounds[:-1][counts > 0])
        return int((widest * counts[counts > 0]).sum())

    def cost(self, widths: np.ndarray, pass_tokens: int) -> int:
        """The tokens of each micro-batch's largest share, and `pass_tokens` for each micro-batch."""
        widest = widths[self.rows[np.minimum(self.bounds[:-1], len(self.rows) - 1)]]
        largest = (widest * np.diff(self.bounds)).reshape(-1, self.world_size).max(axis=1)
        return int((largest + pass_tokens).sum())


def share_out(rows: np.ndarray, lengths: np.ndarray, world_size: int, accumulation: int) -> Shares:
    """Divides the rows of a global batch as evenly as possible, from long to short, so that the processes of
    a micro-batch have similar work."""
    by_length = rows[np.lexsort((rows, -lengths[rows]))]
    shares = world_size * accumulation
    sizes = len(rows) // shares + (np.arange(shares) < len(rows) % shares)
    return Shares(by_length, np.concatenate([[0], np.cumsum(sizes)]), world_size)


def share_out_tokens(rows: np.ndarray, widths: np.ndarray, world_size: int, max_tokens: int) -> Shares:
    """`share_out` with the fewest micro-batches of at most `max_tokens` tokens with padding per process.

    `widths`: (rows of the file,) tokens with padding. A row that is wider is alone in its share. Shares of a
    micro-batch have similar numbers of tokens: the smallest limit is chosen that does not add micro-batches.
    If there are fewer shares than processes, the largest shares are halved.
    """
    by_length = rows[np.lexsort((rows, -widths[rows]))]
    descending = widths[by_length]
    shares = -(-len(_chunk_starts(descending, max_tokens)) // world_size) * world_size
    limits = range(1, max_tokens)
    fits = bisect_left(limits, True, key=lambda limit: len(_chunk_starts(descending, limit)) <= shares)
    starts = _halve_largest(_chunk_starts(descending, fits + 1), descending, shares)
    return Shares(by_length, _bounds(starts, shares, len(rows)), world_size)


def share_out_cheaply(rows: np.ndarray, widths: np.ndarray, batch: BatchShape) -> Shares:
    """`share_out_tokens` with `batch.max_tokens` or a half, a quarter or an eighth of it, whichever costs
    least: more micro-batches have less padding, but each costs `batch.pass_tokens` besides its tokens."""
    processes, pass_tokens = batch.world_size, batch.pass_tokens
    best = share_out_tokens(rows, widths, processes, batch.max_tokens)
    cost = best.cost(widths, pass_tokens)
    # What one more micro-batch would cost without any padding.
    least = int(widths[rows].sum()) / processes + pass_tokens * (1 + (len(best.bounds) - 1) // processes)
    for part in (2, 4, 8) if cost > least else ():
        other = share_out_tokens(rows, widths, processes, max(1, batch.max_tokens // part))
        if (other_cost := other.cost(widths, pass_tokens)) < cost:
            best, cost = other, other_cost
    return best


def _bounds(starts: Sequence[int] | np.ndarray, shares: int, rows: int) -> np.ndarray:
    """`Shares.bounds` of shares that begin at `starts`; the last ones are empty if there are fewer."""
    bounds = np.full(shares + 1, rows)
    bounds[: len(starts)] = starts
    return bounds


def _halve_largest(starts: np.ndarray, widths: np.ndarray, shares: int) -> np.ndarray:
    """Halves the share with the most tokens until there are `shares`, or each has one row. `starts`: of the
    shares; `widths`: (rows,) from wide to narrow."""
    while len(starts) < shares:
        sizes = np.diff(starts, append=len(widths))
        tokens = np.where(sizes > 1, sizes * widths[starts], 0)
        largest = tokens.argmax()
        if not tokens[largest]:
            break
        starts = np.insert(starts, largest + 1, starts[largest] + (sizes[largest] + 1) // 2)
    return starts


def _chunk_starts(widths: np.ndarray, max_tokens: int) -> np.ndarray:
    """The starts of chunks of at most `max_tokens` tokens, or one row. `widths`: (rows,), descending."""
    sizes = np.maximum(1, max_tokens // widths)  # of a chunk that begins at this row: from small to large
    starts, first = [np.zeros(0, dtype=np.int64)], 0
    while first < len(sizes):
        end = np.searchsorted(sizes, sizes[first], side="right")
        starts.append(np.arange(first, end, sizes[first]))
        first = int(starts[-1][-1] + sizes[first])
    return np.concatenate(starts)


def evaluation_batches(
    widths: np.ndarray, batch_size: int, max_tokens: int | None, world_size: int, rank: int
) -> list[np.ndarray]:
    """This process's batches of an evaluation, from long rows to short ones. Each row is on one process.

    `widths`: (rows,) tokens with padding. A batch has `batch_size` rows or, with `max_tokens`, at most so
    many tokens with padding. All processes get the same number of batches; the last ones may be empty.
    """
    rows, widest = np.arange(len(widths), dtype=_index_type(len(widths))), int(widths.max(initial=0))
    # numpy sorts 16-bit numbers by radix, in a quarter of the time.
    by_length = rows[np.argsort((widest - widths).astype(np.min_scalar_type(widest)), kind="stable")]
    if max_tokens is not None:
        starts = _chunk_starts(widths[by_length], max_tokens)
    else:
        starts = np.arange(0, len(rows), batch_size)
    bounds = _bounds(starts, -(-len(starts) // world_size) * world_size, len(rows))
    return [by_length[share] for share in Shares(by_length, bounds, world_size).of(rank)]


def _index_type(rows: int) -> type:
    """The narrower type for row numbers: of 10^8 rows a process keeps two orders and sorts a third."""
    return np.int32 if rows < 2**31 else np.int64
