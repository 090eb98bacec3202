"""Writes folders of generated images once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "sample_images.json"  # written last, when the folder is complete


def fill(
    folder: Path, manifest: dict[str, Any], force: bool, draw: Callable[[Path, str], None]
) -> dict[str, int]:
    """Calls `draw`(folder, split) for each split, unless the folder already has this manifest. Returns the
    number of images per split. `manifest`: "rows" by split, and everything else that decides the images.
    Raises `FileExistsError` for a folder with other files."""
    rows, file = manifest["rows"], folder / MANIFEST
    if not force and file.is_file() and file.read_text(encoding="utf-8") == json.dumps(manifest):
        return rows
    if folder.exists() and any(folder.iterdir()) and not file.is_file():
        raise FileExistsError(f"it holds {min(os.listdir(folder))} from elsewhere")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text("{}", encoding="utf-8")
    for split in rows:
        shutil.rmtree(folder / split, ignore_errors=True)
        draw(folder / split, split)
    file.write_text(json.dumps(manifest), encoding="utf-8")
    return rows
