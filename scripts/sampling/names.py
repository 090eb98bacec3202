"""Short news with the names of persons, places and companies, tagged in IOB2."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROWS = {"train": 1200, "validation": 150, "test": 150}
FIRST, SYLLABLES = (
    words.split()
    for words in (
        "Anna Ben Clara David Emma Felix Grace Henry Ines Jonas Kira Leo Maria Noah Olga Paul",
        "an bel cor dan el far gor hal im jor kel lin mar nor ol per quin ros sal tor un vel wen",
    )
)
PLACES = ("{}ford", "{}ville", "North {}ton", "{} Bay", "Port {}", "{}burg")
COMPANIES = ("{} Mills", "{} and Sons", "{} Bank", "{} Motors", "Bank of {}", "United {}")
NEWS = (
    "{person} of {company} moved to {place} last year .",
    "Shares of {company} rose after {person} left the board .",
    "The mayor of {place} , {person} , opened a new bridge .",
    "It rained in {place} and {place} , but nobody minded .",
    "{company} buys {company} , reports {person} from {place} .",
    "{person} and {person} won the race around {place} .",
    "Nothing else happened on that day .",
    '" {company} will stay in {place} , " said {person} .',
)


def draw_rows(seed: int, number: int) -> Iterator[dict]:
    """Yields rows {"id", "tokens", "tags"}. Nearly every name occurs once, so that only its shape and the
    words around it tell its type."""
    chance = random.Random(seed)
    for row in range(number):
        tokens, tags = [], []
        for word in chance.choice(NEWS).split():
            slot = re.fullmatch(r"\{(\w+)\}", word)
            name = draw_name(chance, slot[1]).split() if slot else [word]
            tokens += name
            tags += [f"{'I' if n else 'B'}-{slot[1]}" if slot else "O" for n in range(len(name))]
        yield {"id": row, "tokens": tokens, "tags": tags}


def draw_name(chance: random.Random, kind: str) -> str:
    family = "".join(chance.choices(SYLLABLES, k=2)).title()
    if kind == "person":
        return f"{chance.choice(FIRST)} {family}" if chance.random() < 0.8 else family
    return chance.choice(PLACES if kind == "place" else COMPANIES).format(family)


def write_names(folder: Path) -> dict[str, int]:
    """Writes SPLIT.jsonl into the folder. Returns the number of rows by split. Raises `FileExistsError` for
    files of these names with other content."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, number) in enumerate(ROWS.items()):
        path, rows = folder / f"{split}.jsonl", map(json.dumps, draw_rows(seed, number))
        text = "".join(f"{row}\n" for row in rows)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise FileExistsError(f"it holds {path.name} from elsewhere")
        path.write_text(text, encoding="utf-8")
    return ROWS
