"""The order of rows, and their distribution over processes: pure functions of (seed, epoch) and the lengths
of the rows.

The order and the global batches do not depend on the number of processes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MEGABATCH = 50  # global batches; rows are sorted by length within a megabatch


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
    batch have similar lengths, but batches differ between epochs. The incomplete batch comes last. The first
    batch of a training contains the longest row, so that a job that needs too much memory fails at once.
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
        shuffled = [
            rows[np.random.default_rng([seed, number, index]).permutation(len(rows))] for index in passes
        ]
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
    low, high = 1, max_tokens  # binary search for the smallest limit
    while low < high:
        middle = (low + high) // 2
        if len(_chunk_starts(descending, middle)) <= shares:
            high = middle
        else:
            low = middle + 1
    starts = _halve_largest(_chunk_starts(descending, high).tolist(), descending, shares)
    return Shares(by_length, _bounds(starts, shares, len(rows)), world_size)


def _bounds(starts: Sequence[int] | np.ndarray, shares: int, rows: int) -> np.ndarray:
    """`Shares.bounds` of shares that begin at `starts`; the last ones are empty if there are fewer."""
    bounds = np.full(shares + 1, rows)
    bounds[: len(starts)] = starts
    return bounds


def _halve_largest(starts: list[int], widths: np.ndarray, shares: int) -> list[int]:
    """Halves the share with the most tokens until there are `shares`, or each has one row. `starts`: of the
    shares; `widths`: (rows,) from wide to narrow."""
    ends = [*starts[1:], len(widths)]
    largest = [  # the first of those that are equally large comes first
        (-(end - start) * int(widths[start]), start, end)
        for start, end in zip(starts, ends, strict=True)
        if end - start > 1
    ]
    heapq.heapify(largest)
    starts = list(starts)
    while len(starts) < shares and largest:
        _, start, end = heapq.heappop(largest)
        middle = (start + end + 1) // 2
        starts.append(middle)
        for first, last in ((start, middle), (middle, end)):
            if last - first > 1:
                heapq.heappush(largest, (-(last - first) * int(widths[first]), first, last))
    return sorted(starts)


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
