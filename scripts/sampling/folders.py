"""A folder of generated pictures: whole or not vouched for, made once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

MADE = "sample_images.json"  # written last: what it stands beside is whole


def fill(folder: Path, made: dict[str, Any], force: bool, draw: Callable[[Path, str], None]) -> dict[str, int]:
    """Has `draw` write each split's folder, unless that was done before; returns the pictures per split. `made`: `rows` by
    split, and all else that decides what is drawn. Raises FileExistsError for a folder that holds other files."""
    rows, note = made["rows"], folder / MADE
    if not force and note.is_file() and note.read_text(encoding="utf-8") == json.dumps(made):
        return rows
    if folder.exists() and any(folder.iterdir()) and not note.is_file():
        raise FileExistsError(f"it holds {min(os.listdir(folder))} from elsewhere")
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text("{}", encoding="utf-8")  # vouches for nothing until all is there
    for split in rows:
        shutil.rmtree(folder / split, ignore_errors=True)
        draw(folder / split, split)
    note.write_text(json.dumps(made), encoding="utf-8")
    return rows
