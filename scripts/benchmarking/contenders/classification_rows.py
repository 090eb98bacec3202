"""The rows that classifiers are trained on, read as short as one would write it."""

from __future__ import annotations

import json
from typing import Any

Rows = tuple[list[str], list[list[float]], list[str], list[list[float]]]


def labelled_rows(settings: dict[str, Any]) -> Rows:
    """Texts and 0.0 or 1.0 for every label: of the first settings["rows"] rows of a jsonl file, then of the next
    settings["held_rows"], which are not trained on. Labels are those of the first part, in the order of their appearance."""
    count = settings["rows"]
    with open(settings["train_file"], encoding="utf-8") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(count + settings["held_rows"]), strict=False)]
    names = list(dict.fromkeys(name for row in rows[:count] for name in row["labels"]))
    texts, targets = [row["text"] for row in rows], [[float(name in row["labels"]) for name in names] for row in rows]
    return texts[:count], targets[:count], texts[count:], targets[count:]
