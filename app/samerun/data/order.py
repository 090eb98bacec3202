"""The order of rows, and their distribution over processes: pure functions of (seed, epoch) and the lengths
of the rows.

The order and the global batches do not depend on the number of processes.
"""

from __future__ import annotations

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
    """(rows,) int64: the training order of an epoch. Consecutive `global_batch_size` entries are one global
    batch.

    Without `weights`, each row occurs once. With `weights`, (rows,), sum 1, a row of weight w occurs w * rows
    times, rounded up or down at random. With `length_grouping`, the shuffled rows are cut into megabatches of
    50 global batches. Each megabatch is sorted by length, then the global batches are shuffled: rows of a
    batch have similar lengths, but batches differ between epochs. The incomplete batch comes last. The first
    batch of a training contains the longest row, so that a job that needs too much memory fails at once.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
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
    """(counts.sum(),) int64: the rows of an epoch of a mixture, source by source; `epoch_order` shuffles
    them.

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


def share_out(
    rows: np.ndarray, lengths: np.ndarray, world_size: int, accumulation: int
) -> list[list[np.ndarray]]:
    """Distributes the rows of a global batch as evenly as possible. Returns [micro-batch][process] -> rows,
    maybe none.

    Rows are distributed from long to short, so that the processes of a micro-batch have similar work.
    """
    by_length = rows[np.lexsort((rows, -lengths[rows]))]
    shares = np.array_split(by_length, world_size * accumulation)
    return [shares[first : first + world_size] for first in range(0, len(shares), world_size)]


def share_out_tokens(
    rows: np.ndarray, widths: np.ndarray, world_size: int, max_tokens: int
) -> list[list[np.ndarray]]:
    """Like `share_out`, with the fewest micro-batches of at most `max_tokens` tokens per process, padding
    included.

    `widths`: (rows of the file,) tokens with padding. A row wider than `max_tokens` is alone in its share.
    Shares of a micro-batch have similar numbers of tokens: the smallest limit is chosen that does not add
    micro-batches. If there are fewer shares than processes, the largest shares are halved.
    """
    by_length = rows[np.lexsort((rows, -widths[rows]))]
    micro_batches = -(-len(_chunks(by_length, widths, max_tokens)) // world_size)
    low, high = 1, max_tokens  # binary search for the smallest limit
    while low < high:
        middle = (low + high) // 2
        if len(_chunks(by_length, widths, middle)) <= micro_batches * world_size:
            high = middle
        else:
            low = middle + 1
    shares = _chunks(by_length, widths, high)
    while len(shares) < micro_batches * world_size:
        largest = max(
            (i for i, share in enumerate(shares) if len(share) > 1),
            key=lambda i: len(shares[i]) * int(widths[shares[i][0]]),
            default=None,
        )
        if largest is None:
            shares.append(rows[:0])
        else:
            shares[largest : largest + 1] = np.array_split(shares[largest], 2)
    return [shares[first : first + world_size] for first in range(0, len(shares), world_size)]


def _chunks(rows: np.ndarray, widths: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Cuts `rows`, sorted from long to short, into chunks of at most `max_tokens` tokens, or of one row."""
    chunks, first = [], 0
    while first < len(rows):
        size = max(1, max_tokens // int(widths[rows[first]]))
        chunks.append(rows[first : first + size])
        first += size
    return chunks


def evaluation_batches(
    widths: np.ndarray, batch_size: int, max_tokens: int | None, world_size: int, rank: int
) -> list[np.ndarray]:
    """This process's batches of an evaluation, from long rows to short ones. Each row is on exactly one
    process.

    `widths`: (rows,) tokens with padding. A batch has `batch_size` rows or, with `max_tokens`, at most so
    many tokens with padding. All processes get the same number of batches; the last ones may be empty.
    """
    by_length = np.argsort(-widths, kind="stable")
    if max_tokens is not None:
        batches = _chunks(by_length, widths, max_tokens)
    else:
        batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    batches += [by_length[:0]] * (-len(batches) % world_size)
    return batches[rank::world_size]
