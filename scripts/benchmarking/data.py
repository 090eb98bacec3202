"""The data that sections work on: files of a folder that is named, or the sample corpus."""

from __future__ import annotations

import csv
import functools
import gzip
import itertools
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarking.processes import REPOSITORY

KINDS = ("short", "long_tailed", "titles", "chinese")
ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")
SHORT_ROWS = 4000


@dataclass(frozen=True)
class Source:
    path: str
    name: str


def source_of(kind: str, given: Path | None, folder: Path) -> Source | None:
    """The file of `kind` in the folder that was given (short.csv.gz, titles.jsonl, ...), or one from the sample corpus, whose
    texts are long-tailed and have titles; None for Chinese text where there is none.

    names.json beside the files may say what to call them: {"short": "XED emotions"}.
    """
    if given is not None:
        names = given / "names.json"
        called = json.loads(names.read_text(encoding="utf-8")) if names.exists() else {}
        for ending in ENDINGS:
            path = given / f"{kind}{ending}"
            if path.exists():
                return Source(str(path.absolute()), called.get(kind, path.name))
    if kind == "chinese":
        return None
    corpus = sample_training_file()
    if kind != "short":
        return Source(str(corpus), "sample corpus")
    path = folder / "short.jsonl"
    with corpus.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, SHORT_ROWS)]
    path.write_text("".join(json.dumps({"text": r["title"], "labels": r["labels"]}) + "\n" for r in rows), encoding="utf-8")
    return Source(str(path), "titles of the sample corpus")


@functools.cache
def sample_training_file() -> Path:
    """The training rows of the sample corpus, which is made first if it is not there."""
    corpus = REPOSITORY / "sample_data"
    subprocess.run([sys.executable, REPOSITORY / "scripts/make_sample_data.py", "--output_dir", corpus], check=True)
    return corpus / "train.jsonl"


def draw_rows(source: Source, count: int, seed: int, path: Path) -> None:
    """Writes `count` rows with text and labels, drawn from the file, as jsonl: files are often sorted by label or by date."""
    csv.field_size_limit(2**31 - 1)
    with (gzip.open if source.path.endswith(".gz") else open)(source.path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file) if ".csv" in Path(source.path).name else map(json.loads, file))
    with path.open("w", encoding="utf-8") as file:
        for row in random.Random(seed).sample(rows, min(count, len(rows))):
            labels = [name for name in row["labels"].split("|") if name] if isinstance(row["labels"], str) else row["labels"]
            file.write(json.dumps({"text": row["text"], "labels": labels}, ensure_ascii=False) + "\n")
