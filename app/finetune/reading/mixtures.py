"""Rows of several files that are mixed by weights: --mixing_weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finetune.errors import InputError
from finetune.reading.tables import Table


@dataclass(frozen=True)
class Mixture:
    """Training rows of several sources, numbered from 0, with weights. `source`: (rows,) of each row; `weights`: by source, its
    share of an epoch, which has as many rows as there are; they sum to 1."""

    source: np.ndarray
    weights: tuple[float, ...]

    @property
    def counts(self) -> np.ndarray:
        """(sources,) int64: how many rows each source gives an epoch."""
        exact = len(self.source) * np.asarray(self.weights)
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: len(self.source) - counts.sum()]] += 1  # the largest remainders
        return counts

    @classmethod
    def of(cls, source: np.ndarray, weights: Sequence[float], paths: Sequence[str], notes: list[str]) -> Mixture:
        """By --mixing_weights, with a note. `source`: (rows,) as above; `paths`: the sources in words. Raises `InputError` for
        a source that would give no rows."""
        found = cls(source, tuple(weight / sum(weights) for weight in weights))
        there = np.bincount(source, minlength=len(weights))
        problems = [
            f"--mixing_weights: {path}, with a weight of {weight:g}, gives no row to an epoch of {len(source)} ({rows} of its "
            "rows are left for training); give it more rows or a larger weight, or leave it out"
            for path, weight, rows, count in zip(paths, weights, there, found.counts, strict=True)
            if not rows or not count
        ]
        if problems:
            raise InputError(*problems)
        shares = [f"{count} from the {rows} of {path}" for path, rows, count in zip(paths, there, found.counts, strict=True)]
        notes.append(f"rows of an epoch: {', '.join(shares)} (--mixing_weights)")
        return found


def mixture_of(table: Table, weights: Sequence[float] | None, notes: list[str]) -> Mixture | None:
    """How --mixing_weights mixes the files of a table (`Mixture.of`); None without weights."""
    if weights is None:
        return None
    numbers = [source.argument for source in table.sources]
    paths = [table.sources[numbers.index(number)].path for number in range(len(weights))]
    return Mixture.of(np.array(numbers)[table.source], weights, paths, notes)
