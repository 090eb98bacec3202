"""Which rows meet in which batch, and which process gets them. Pure functions of (seed, epoch) and the rows' lengths.

Nothing here knows the launcher; the number of processes enters only where one global batch is shared out.
"""

from __future__ import annotations

import numpy as np

MEGABATCHES = 50  # rows are sorted by length within runs of this many global batches, and shuffled beyond


def epoch_order(
    seed: int,
    epoch: int,
    lengths: np.ndarray,
    global_batch_size: int,
    length_grouping: bool,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """(rows,) int64: every row once; each run of `global_batch_size` entries is one optimizer step's batch.

    With `weights`, (rows,), which sum to 1, a row is there n times its weight, rounded up or down at random, of n rows in all.
    With `length_grouping` a shuffled order is cut into runs of 50 global batches, each sorted by length, and the resulting
    batches are shuffled again: rows of a batch have similar lengths, and which rows meet still changes from epoch to epoch.
    The incomplete batch comes last. The very first batch of a run holds the longest row, so that a job that is too large for
    its memory says so at once.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    if weights is not None:
        order = generator.permutation(_drawn(generator, order, weights))
    if not length_grouping or len(lengths) <= global_batch_size:
        return order
    # Small files get shorter runs: at least four, or whole epochs would be one sorted run with the same batches every time.
    run = global_batch_size * max(1, min(len(lengths) // (4 * global_batch_size), MEGABATCHES))
    runs = [order[start : start + run] for start in range(0, len(order), run)]
    order = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in runs])
    full = len(order) // global_batch_size
    batches = order[: full * global_batch_size].reshape(full, global_batch_size)
    batches = batches[generator.permutation(full)]
    if epoch == 0:
        longest = int(lengths[batches].max(axis=1).argmax())
        batches[[0, longest]] = batches[[longest, 0]]
    order = np.concatenate([batches.reshape(-1), order[full * global_batch_size :]])
    if epoch == 0:
        longest = int(lengths[order].argmax())  # elsewhere only if the incomplete batch has it
        if longest >= global_batch_size:
            order[[0, longest]] = order[[longest, 0]]
    return order


def mixed_rows(seed: int, epoch: int, source: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(counts.sum(),) int64: the rows of an epoch of a mixture, source by source; `epoch_order` shuffles them.

    `source`: (rows,) the number of each row's source; `counts`: (sources,) how many rows each gives an epoch.

    Each source is passed over again and again, shuffled anew in each pass, and epochs are consecutive pieces of that: no row
    comes a second time before all the others of its source have come.
    """
    parts = []
    for number, count in enumerate(counts.tolist()):
        if not count:
            continue
        rows, first = np.flatnonzero(source == number), epoch * count
        passes = range(first // len(rows), (first + count - 1) // len(rows) + 1)
        shuffled = [rows[np.random.default_rng([seed, number, each]).permutation(len(rows))] for each in passes]
        begin = first - passes.start * len(rows)
        parts.append(np.concatenate(shuffled)[begin : begin + count])
    return np.concatenate(parts)


def _drawn(generator: np.random.Generator, order: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """As many rows as `order` has, by systematic sampling along it: of all ways to draw that varies least."""
    ends = np.cumsum(weights[order])
    points = (np.arange(len(order)) + generator.random()) / len(order) * ends[-1]
    return order[np.searchsorted(ends[:-1], points, side="right")]


def share_out(rows: np.ndarray, lengths: np.ndarray, world_size: int, accumulation: int) -> list[list[np.ndarray]]:
    """Shares one global batch out: [micro-batch][process] -> rows, as even in number as possible, some maybe empty.

    Rows are dealt in the order of their lengths, longest first, so that the processes of one micro-batch have rows of
    similar length and finish together.
    """
    by_length = rows[np.lexsort((rows, -lengths[rows]))]
    shares = np.array_split(by_length, world_size * accumulation)
    return [shares[step * world_size : (step + 1) * world_size] for step in range(accumulation)]


def share_out_tokens(
    rows: np.ndarray, widths: np.ndarray, world_size: int, max_tokens: int, padding_free: bool = False
) -> list[list[np.ndarray]]:
    """As `share_out`, in forward passes of at most `max_tokens` tokens each, padding included; as few as that takes.

    `widths`: of each row of the file, padded. `padding_free`: rows of a pass are not padded to its widest. A row wider than
    `max_tokens` gets a pass of its own. Rows are cut into runs of similar length, the most even ones that fit, so that the
    processes of a pass have about as many tokens; where processes outnumber runs, the runs of most tokens are halved.
    """
    by_length = rows[np.lexsort((rows, -widths[rows]))]
    passes = -(-len(_runs(by_length, widths, max_tokens, padding_free)) // world_size)
    low, high = 1, max_tokens  # the least budget that takes no more passes
    while low < high:
        middle = (low + high) // 2
        if len(_runs(by_length, widths, middle, padding_free)) <= passes * world_size:
            high = middle
        else:
            low = middle + 1
    runs = _runs(by_length, widths, high, padding_free)
    while len(runs) < passes * world_size:
        place = max(
            (i for i, run in enumerate(runs) if len(run) > 1),
            key=lambda i: _tokens(runs[i], widths, padding_free),
            default=None,
        )
        if place is None:
            runs.append(rows[:0])
        else:
            runs[place : place + 1] = np.array_split(runs[place], 2)
    return [runs[first : first + world_size] for first in range(0, len(runs), world_size)]


def _runs(rows: np.ndarray, widths: np.ndarray, max_tokens: int, padding_free: bool) -> list[np.ndarray]:
    """`rows`, longest first, in runs of at most `max_tokens` tokens or one row."""
    found, first = [], 0
    ends = np.cumsum(widths[rows])
    while first < len(rows):
        if padding_free:
            before = ends[first] - widths[rows[first]]
            size = max(1, int(np.searchsorted(ends, before + max_tokens, side="right")) - first)
        else:
            size = max(1, max_tokens // int(widths[rows[first]]))
        found.append(rows[first : first + size])
        first += size
    return found


def _tokens(run: np.ndarray, widths: np.ndarray, padding_free: bool) -> int:
    if padding_free:
        return int(widths[run].sum())
    return len(run) * int(widths[run[0]]) if len(run) else 0


def evaluation_batches(
    widths: np.ndarray, batch_size: int, max_tokens: int | None, world_size: int, rank: int
) -> list[np.ndarray]:
    """This process's batches of a file that is evaluated: longest rows first, every row on exactly one process.

    `widths`: of each row, padded. A batch has `batch_size` rows, or, with `max_tokens`, as many as have no more tokens than
    that, padding included. All processes get the same number of batches; one that has no rows left gets empty ones.
    """
    by_length = np.argsort(-widths, kind="stable")
    if max_tokens is not None:
        batches = _runs(by_length, widths, max_tokens, padding_free=False)
    else:
        batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    batches += [by_length[:0]] * (-len(batches) % world_size)
    return batches[rank::world_size]
