"""Rows of controlled length, cut from and put together out of real ones."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE_ROWS = 2000  # rows of a file that are read


def batch_size(settings: dict[str, Any], length: int) -> int:
    """Rows of `length` tokens per optimizer step: about the same number of tokens at every length."""
    return max(1, settings["tokens_per_step"] // length)


def document_lengths(settings: dict[str, Any]) -> list[int]:
    """Tokens of each document that gets a title: from half the length to all of it, in an order without meaning, none so
    short that transformers' BigBird would turn dense on its batch."""
    longest, count = settings["generate_length"], settings["documents"]
    shortest = min(longest, max(longest // 2, 12 * settings["block_size"]))
    lengths = [shortest + (longest - shortest) * i // max(1, count - 1) for i in range(count)]
    random.Random(settings["seed"]).shuffle(lengths)
    return lengths


def read_rows(path: str) -> list[dict[str, str]]:
    """The first rows of a jsonl file, perhaps .gz, that have a text and a title."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, itertools.islice(file, SOURCE_ROWS)) if row.get("text") and row.get("title")]
    if not rows:
        raise SystemExit(f"{path}: none of its first {SOURCE_ROWS} rows has a text and a title")
    return rows


def write_rows(path: Path, rows: Iterator[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def cut_rows(rows: list[dict[str, str]], tokenizer: Any, lengths: list[int]) -> Iterator[dict[str, str]]:
    """Rows of about so many tokens each, special ones included: documents put together, the last of them cut.

    A text that is cut within a word may get a token more or less.
    """
    source = itertools.cycle(rows)
    known: dict[int, list[tuple[int, int]]] = {}
    for length in lengths:
        parts, missing, title = [], length - tokenizer.num_special_tokens_to_add(), None
        while missing > 0:
            row = next(source)
            if id(row) not in known:
                known[id(row)] = tokenizer(row["text"], return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
            spans = known[id(row)]
            title = title or row["title"]
            parts.append(row["text"][: spans[missing - 1][1]] if len(spans) >= missing else row["text"])
            missing -= len(spans)
        yield {"text": "\n".join(parts), "title": title}
