"""The sections' data: files of --data, or the sample corpus."""

import csv
import functools
import gzip
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarking.processes import REPOSITORY

SHORT_ROWS = 4000
LABELS = [f"label {number}" for number in range(20)]  # of `random_rows`
WORDS = ["sort", "the", "values", "of", "a", "matrix", "and", "return", "its", "eigenvalues", "as", "vectors"]


class Source(NamedTuple):
    path: str
    name: str


def find_source(kind: str, data: Path | None, folder: Path) -> Source:
    """The file of `kind` in the folder `data` (short.csv.gz, titles.jsonl, ...), or else the sample corpus,
    whose texts are of mixed length and have titles.

    An optional names.json beside the files holds display names: {"short": "XED emotions"}.
    """
    if data is not None:
        file = data / "names.json"
        names = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for path in data.glob(f"{kind}.*"):
            return Source(str(path.absolute()), names.get(kind, path.name))
    if kind != "short":
        return Source(sample_training_file(), "sample corpus")
    rows = [
        {"text": row["title"], "labels": row["labels"]}
        for row in read_rows(sample_training_file(), SHORT_ROWS)
    ]
    write_rows(folder / "short.jsonl", rows)
    return Source(str(folder / "short.jsonl"), "titles of the sample corpus")


@functools.cache
def sample_training_file() -> str:
    corpus = REPOSITORY / "sample_data"
    make_sample_data("--output_dir", corpus)
    return str(corpus / "train.jsonl")


def make_sample_data(*words: str | Path) -> None:
    """Runs scripts/make_sample_data.py, which reuses existing data."""
    subprocess.run([sys.executable, REPOSITORY / "scripts" / "make_sample_data.py", *words], check=True)


def read_rows(path: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """The first rows of a csv or jsonl file, compressed (.gz) or not."""
    csv.field_size_limit(2**31 - 1)
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8", newline="") as file:
        yield from itertools.islice(
            csv.DictReader(file) if ".csv" in Path(path).name else map(json.loads, file), limit
        )


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def random_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Short distinct texts, each with one to three of `LABELS`."""
    generator = random.Random(seed)
    for row in range(count):
        words = generator.choices(WORDS, k=generator.randint(6, 17))
        labels = generator.choices(LABELS, k=generator.randint(1, 3))
        yield {"text": f"{row} {' '.join(words)}", "labels": sorted(set(labels))}


def sample_rows(source: Source, count: int, seed: int, path: Path) -> None:
    """Writes `count` random rows (text and labels) of the source: files are often sorted by label or by
    date."""
    rows = list(read_rows(source.path))
    sample = random.Random(seed).sample(rows, min(count, len(rows)))
    for row in sample:
        if isinstance(row["labels"], str):
            row["labels"] = [name for name in row["labels"].split("|") if name]
    write_rows(path, ({"text": row["text"], "labels": row["labels"]} for row in sample))
