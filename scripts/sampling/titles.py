"""Titles: descriptions of parameters in the docstrings of the libraries in requirements.txt, and the
parameters' names in words.

    train.jsonl, validation.jsonl, test.jsonl    {"id", "title": "max iter", "text": "Maximum number of ..."}

Rows of a module are in the same split (about 90/5/5), and no two texts share half of their phrases. Most
titles of test rows also occur in training, because many functions have parameters of the same name. The
sources are parsed, not imported.
"""

import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import sys
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from sampling.docstrings import described_parameters, documented

PACKAGES = [
    *("numpy", "scipy", "pandas", "sklearn", "torch", "transformers", "accelerate", "datasets", "evaluate"),
    *("huggingface_hub", "tokenizers", "nltk", "networkx", "sympy", "deepspeed"),
]
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # import name -> other name on PyPI
FOLDERS = {
    name: Path(next(iter(spec.submodule_search_locations)))
    for name in PACKAGES
    if (spec := importlib.util.find_spec(name))  # does not import it
}


def version(name: str) -> str:
    """The version of a package; "" without metadata."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return ""


ORIGIN = {
    "version": 1,
    "versions": {name: version(name) for name in FOLDERS},
    "python": list(sys.version_info[:2]),
}
SPLITS = ("train", "validation", "test")
MIN_CHARACTERS, MAX_CHARACTERS = 60, 600  # of a description
NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # of get_HTMLName2: get, HTML, Name, 2


def write(folder: Path) -> dict[str, int]:
    """Writes SPLIT.jsonl. Returns the rows by split."""
    warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes in other people's strings
    warnings.simplefilter("ignore", DeprecationWarning)
    gc.disable()  # parsing creates millions of objects without cycles: saves an eighth of the time
    rows = without_duplicates(chain.from_iterable(map(title_rows, FOLDERS.values())))
    if not rows:
        raise OSError("none of the packages of requirements.txt is installed")
    splits = split_titles(rows)
    for split, own in splits.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in own]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {split: len(own) for split, own in splits.items()}


def title_rows(root: Path) -> Iterator[dict[str, str]]:
    """Yields the rows (id, module, title, text) of a package folder, with duplicates."""
    for module, name, doc in documented(root, MIN_CHARACTERS):
        for parameter, text in dict(described_parameters(doc)).items():
            title, text = " ".join(NAME_PART.findall(parameter)).lower(), text.lstrip(" ,;:.-")
            named = len(title) > 2 and parameter not in ("args", "kwargs")
            # Mainly letters and spaces, unlike tables and formulas.
            is_prose = sum(map(str.isalpha, text)) + text.count(" ") >= 0.8 * len(text)
            if named and text[:1].isalpha() and is_prose and MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
                yield {"id": f"{name}.{parameter}", "module": module, "title": title, "text": text}


def without_duplicates(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Keeps the first of all rows with the same id, the same text, or texts that share half of their phrases.

    A phrase is a run of five words. The 64 smallest CRC-32 values of a text's phrases are a bottom-k sketch,
    whose overlap with another sketch estimates the Jaccard similarity of the phrase sets. The 8 smallest
    values find candidates.
    """
    kept, seen, sketches, buckets = [], set(), [], defaultdict(list)
    for row in rows:
        words = normalised(row["text"]).split()
        keys = {row["id"], " ".join(words), normalised(row["title"] + " " + row["text"][:200])}
        if seen & keys:
            continue
        starts = range(max(len(words) - 4, 1))
        phrases = {zlib.crc32(" ".join(words[start : start + 5]).encode()) for start in starts}
        sketch = sorted(phrases)[:64]
        candidates = {index for value in sketch[:8] for index in buckets[value]}
        if any(similarity(sketch, sketches[index]) >= 0.5 for index in candidates):
            continue
        for value in sketch[:8]:
            buckets[value].append(len(kept))
        seen |= keys
        kept.append(row)
        sketches.append(frozenset(sketch))
    return kept


def similarity(sketch: list[int], other: frozenset[int]) -> float:
    """Estimated Jaccard similarity of two phrase sets from their bottom-k sketches."""
    smallest = sorted(other.union(sketch))[:64]
    return len(other.intersection(sketch).intersection(smallest)) / len(smallest)


def normalised(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def split_titles(rows: Iterable[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Splits rows by the MD5 of their module and sorts them by the MD5 of their text."""
    splits: dict[str, list[dict[str, str]]] = {name: [] for name in SPLITS}
    for row in sorted(rows, key=lambda row: (md5(normalised(row["text"])), row["id"])):
        share = int(md5(row.pop("module"))[:8], 16) % 20
        splits[SPLITS[max(share - 17, 0)]].append(row)
    return splits


def md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()
