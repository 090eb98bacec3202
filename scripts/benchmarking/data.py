"""The data that sections work on: files of a folder that is named, or the sample corpus."""

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
LABELS = [f"label {number}" for number in range(20)]  # of rows that are made up
WORDS = ["sort", "the", "values", "of", "a", "matrix", "and", "return", "its", "eigenvalues", "as", "vectors"]


class Source(NamedTuple):
    path: str
    name: str


def source_of(kind: str, given: Path | None, folder: Path) -> Source:
    """The file of `kind` in the folder that was given (short.csv.gz, titles.jsonl, ...), or one from the sample corpus, whose
    texts are long-tailed and have titles.

    names.json beside the files may say what to call them: {"short": "XED emotions"}.
    """
    if given is not None:
        names = given / "names.json"
        called = json.loads(names.read_text(encoding="utf-8")) if names.exists() else {}
        for path in given.glob(f"{kind}.*"):
            return Source(str(path.absolute()), called.get(kind, path.name))
    if kind != "short":
        return Source(sample_training_file(), "sample corpus")
    rows = [{"text": row["title"], "labels": row["labels"]} for row in read_rows(sample_training_file(), SHORT_ROWS)]
    write_rows(folder / "short.jsonl", rows)
    return Source(str(folder / "short.jsonl"), "titles of the sample corpus")


@functools.cache
def sample_training_file() -> str:
    corpus = REPOSITORY / "sample_data"
    make_sample_data("--output_dir", corpus)
    return str(corpus / "train.jsonl")


def make_sample_data(*words: str | Path) -> None:
    """Runs scripts/make_sample_data.py, which keeps what is there."""
    subprocess.run([sys.executable, REPOSITORY / "scripts" / "make_sample_data.py", *words], check=True)


def read_rows(path: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """The first rows of a csv or jsonl file, perhaps .gz."""
    csv.field_size_limit(2**31 - 1)
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8", newline="") as file:
        yield from itertools.islice(csv.DictReader(file) if ".csv" in Path(path).name else map(json.loads, file), limit)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def made_up_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Short texts, no two alike, with one to three of `LABELS`."""
    drawn = random.Random(seed)
    for row in range(count):
        words, labels = drawn.choices(WORDS, k=drawn.randint(6, 17)), drawn.choices(LABELS, k=drawn.randint(1, 3))
        yield {"text": f"{row} {' '.join(words)}", "labels": sorted(set(labels))}


def draw_rows(source: Source, count: int, seed: int, path: Path) -> None:
    """Writes `count` rows with text and labels, drawn from the file: files are often sorted by label or by date."""
    rows = list(read_rows(source.path))
    drawn = random.Random(seed).sample(rows, min(count, len(rows)))
    for row in drawn:
        if isinstance(row["labels"], str):
            row["labels"] = [name for name in row["labels"].split("|") if name]
    write_rows(path, ({"text": row["text"], "labels": row["labels"]} for row in drawn))
