"""Temporary folders of this process. They are removed when it ends, also when it ends at once
(`signals.exit_now`)."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

_folders: list[Path] = []


def temporary_folder(prefix: str) -> Path:
    """Makes a folder with a free name."""
    if not _folders:
        atexit.register(remove_temporary_folders)
    _folders.append(Path(tempfile.mkdtemp(prefix=prefix)))
    return _folders[-1]


def remove_temporary_folders() -> None:
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)
