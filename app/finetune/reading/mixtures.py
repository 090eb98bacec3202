"""Rows of several files that are mixed by weights: --mixing_weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from finetune.errors import InputError

if TYPE_CHECKING:  # it imports pyarrow
    from finetune.reading.tables import Table


@dataclass(frozen=True)
class Mixture:
    """Training rows of several sources, numbered from 0, with weights. `source`: (rows,) of each row; `weights`: by source, its
    share of an epoch, which has as many rows as there are; they sum to 1."""

    source: np.ndarray
    weights: tuple[float, ...]

    @property
    def fingerprint(self) -> list[list[float]]:
        """What the order of rows follows from."""
        return [list(self.weights), np.bincount(self.source).tolist()]

    @property
    def counts(self) -> np.ndarray:
        """(sources,) int64: how many rows each source gives an epoch."""
        exact = len(self.source) * np.asarray(self.weights)
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: len(self.source) - counts.sum()]] += 1  # the largest remainders
        return counts


def mixture_of(table: Table, weights: Sequence[float] | None, notes: list[str]) -> Mixture | None:
    """How --mixing_weights mixes the files of a table, with a note; None without weights. Raises `InputError` for a file that
    would give no rows."""
    if weights is None:
        return None
    total, numbers = sum(weights), np.array([source.argument for source in table.sources])
    mixture = Mixture(numbers[table.source], tuple(weight / total for weight in weights))
    there = np.bincount(mixture.source, minlength=len(weights))
    paths = [next(source.path for source in table.sources if source.argument == number) for number in range(len(weights))]
    problems = [
        f"--mixing_weights: {path}, with a weight of {weight:g}, gives no row to an epoch of {len(table)} ({rows} of its rows "
        "are left for training); give it more rows or a larger weight, or leave it out"
        for path, weight, rows, count in zip(paths, weights, there, mixture.counts, strict=True)
        if not rows or not count
    ]
    if problems:
        raise InputError(*problems)
    shares = [f"{count} from the {rows} of {path}" for path, rows, count in zip(paths, there, mixture.counts, strict=True)]
    notes.append(f"rows of an epoch: {', '.join(shares)} (--mixing_weights)")
    return mixture
