"""What two equal runs have in common, compared to the byte."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# Of a clock or of the machine's memory, and so never twice the same.
CLOCKED = re.compile("runtime|per_second|step_time|stall|memory|train_seconds")


def differences(straight: Path, other: Path) -> list[str]:
    """The files of a run's folder that differ from the straight run's, each with why; [] for equal runs."""
    found = []
    for name in sorted(_kept(straight) | _kept(other)):
        one, two = straight / name, other / name
        if not one.exists() or not two.exists():
            found.append(f"{name} is {'missing' if one.exists() else 'too much'}")
        elif one.suffix == ".json":
            found += _json_differences(name, one, two)
        elif one.read_bytes() != two.read_bytes():
            found.append(f"{name} differs")
    return found


def _kept(folder: Path) -> set[str]:
    """What a run leaves for good. A card and the events of TensorBoard show clocks; older checkpoints are rotated by what came
    before; manifests hold the hashes of files that are compared."""
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
    ours, theirs = (_unclocked(json.loads(path.read_text(encoding="utf-8"))) for path in (one, two))
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return [] if ours == theirs else [f"{name} differs"]
    keys = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
    return [f"{name}: {', '.join(f'{key} {ours.get(key)!r:.40} and {theirs.get(key)!r:.40}' for key in keys)}"] if keys else []


def _unclocked(content: Any) -> Any:
    return {key: value for key, value in content.items() if not CLOCKED.search(key)} if isinstance(content, dict) else content
