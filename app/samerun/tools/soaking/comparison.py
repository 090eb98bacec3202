"""Compares the files of two runs byte by byte, except for times and memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TIME_OR_MEMORY = re.compile("runtime|per_second|step_time|stall|memory|train_seconds")


def differences(straight: Path, other: Path) -> list[str]:
    """How the files of the run `other` differ from those of the run `straight`, one text per file; [] for
    equal runs."""
    different = []
    for name in sorted(_compared_files(straight) | _compared_files(other)):
        one, two = straight / name, other / name
        if not one.exists() or not two.exists():
            different.append(f"{name} is {'missing' if one.exists() else 'unexpected'}")
        elif one.suffix == ".json":
            different += _json_differences(name, one, two)
        elif one.read_bytes() != two.read_bytes():
            different.append(f"{name} differs")
    return different


def _compared_files(folder: Path) -> set[str]:
    """Names of the files to compare. Leaves out the model card and TensorBoard's events (they contain times),
    older checkpoints (their rotation depends on interruptions) and manifests (hashes of files that are
    compared)."""
    files = [
        *folder.glob("best/*"),
        *folder.glob("best_models/*/*"),
        folder / "history.jsonl",
        folder / "metrics.json",
        folder / "predictions.jsonl",
    ]
    newest = max(folder.glob("checkpoints/step_*"), key=_step, default=None)
    if newest is not None:
        files += [path for path in newest.iterdir() if path.name != "manifest.json"]
    return {str(path.relative_to(folder)) for path in files if path.exists()}


def _step(path: Path) -> int:
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdigit() else -1


def _json_differences(name: str, one: Path, two: Path) -> list[str]:
    ours, theirs = (_reproducible(json.loads(path.read_text(encoding="utf-8"))) for path in (one, two))
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return [] if ours == theirs else [f"{name} differs"]
    keys = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
    return (
        [f"{name}: {', '.join(f'{key} {ours.get(key)!r:.40} and {theirs.get(key)!r:.40}' for key in keys)}"]
        if keys
        else []
    )


def _reproducible(content: Any) -> Any:
    """A JSON file's content without the keys for times and memory."""
    if not isinstance(content, dict):
        return content
    return {key: value for key, value in content.items() if not TIME_OR_MEMORY.search(key)}
