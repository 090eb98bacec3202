"""The sections' data: files of --data, or texts made of the subtitles in examples/xed."""

import csv
import gzip
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarking.processes import REPOSITORY

SUBTITLES = REPOSITORY / "examples" / "xed" / "train.csv"
SAMPLE_ROWS = 8000


class Source(NamedTuple):
    path: str
    name: str


def find_source(kind: str, data: Path | None, folder: Path) -> Source:
    """The file of `kind` in the folder `data` (short.csv.gz, titles.jsonl, ...), or else sample texts.

    An optional names.json beside the files holds display names: {"short": "XED emotions"}.
    """
    if data is not None:
        file = data / "names.json"
        names = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for path in data.glob(f"{kind}.*"):
            return Source(str(path.absolute()), names.get(kind, path.name))
    path = folder / f"{kind}.jsonl"
    write_rows(path, sample_texts(kind))
    return Source(str(path), f"{'' if kind == 'short' else 'joined '}subtitles of examples/xed")


def sample_texts(kind: str) -> Iterator[dict[str, Any]]:
    """Rows (text, labels, title) of one or two subtitles each, or, if not of `kind` "short", of mixed
    length."""
    subtitles, chance = list(read_rows(str(SUBTITLES))), random.Random(0)
    for _ in range(SAMPLE_ROWS):
        count = chance.randint(1, 2) if kind == "short" else 1 + int(chance.lognormvariate(1.8, 0.9))
        parts = chance.choices(subtitles, k=count)
        text = " ".join(part["text"] for part in parts)
        yield {"text": text, "labels": parts[0]["labels"], "title": parts[0]["text"]}


def read_rows(path: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """The first rows of a csv or jsonl file, compressed (.gz) or not."""
    csv.field_size_limit(2**31 - 1)
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file) if ".csv" in Path(path).name else map(json.loads, file)
        yield from itertools.islice(rows, limit)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def sample_rows(source: Source, count: int, seed: int, path: Path) -> None:
    """Writes `count` random rows (text and labels) of the source: files are often sorted by label or by
    date."""
    rows = list(read_rows(source.path))
    sample = random.Random(seed).sample(rows, min(count, len(rows)))
    for row in sample:
        if isinstance(row["labels"], str):
            row["labels"] = [name for name in row["labels"].split("|") if name]
    write_rows(path, ({"text": row["text"], "labels": row["labels"]} for row in sample))
