"""Progress bars for work that a user waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

PATIENCE = 3  # seconds before a bar appears


def progress(what: str, unit: str, total: int | None = None) -> Any:
    """A bar of tqdm that appears when the work takes longer than moments; in a log file, one line a minute."""
    interval = 0.1 if sys.stderr.isatty() else 60
    return tqdm(desc=what, unit=f" {unit}", total=total, delay=PATIENCE, mininterval=interval)


def counted(things: Iterable[Any], what: str, unit: str, total: int | None = None) -> Iterator[Any]:
    """The things, with a bar that counts them."""
    with progress(what, unit, total) as bar:
        for thing in things:
            yield thing
            bar.update()
