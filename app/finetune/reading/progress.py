"""How far work is that a user waits for. Level 1."""

from __future__ import annotations

import sys
from typing import Any

PATIENCE = 3  # seconds without a word


def progress(what: str, unit: str, total: int | None = None) -> Any:
    """A bar of tqdm for work that takes longer than moments; where nobody looks at it, in a log, a line a minute."""
    from tqdm import tqdm

    interval = 0.1 if sys.stderr.isatty() else 60
    return tqdm(desc=what, unit=f" {unit}", total=total, delay=PATIENCE, mininterval=interval)
