"""Names: short news with those of persons, places and companies, tagged in IOB2.

train.jsonl, validation.jsonl, test.jsonl    {"id", "tokens", "tags"}
"""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

ROWS = {"train": 1200, "validation": 150, "test": 150}
ORIGIN = {"version": 1}  # of the rows; another version draws them again
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
    "Nothing else happened on day {day} .",
    '" {company} will stay in {place} , " said {person} .',
)


def draw_rows(seed: int, number: int) -> Iterator[dict]:
    """Yields rows {"id", "tokens", "tags"}, at most some thousand. No name and no text occurs twice, so that
    only a name's shape and the words around it tell its type."""
    chance = random.Random(seed)
    families = ["".join(syllables).title() for syllables in itertools.product(SYLLABLES, repeat=2)]
    persons = [f"{first} {family}" for family in families for first in chance.sample(FIRST, 4)]
    names = {
        "person": persons + families,
        "place": [place.format(family) for place in PLACES for family in families],
        "company": [company.format(family) for company in COMPANIES for family in families],
        "day": [str(day) for day in range(1000)],
    }
    for drawn in names.values():
        chance.shuffle(drawn)
    for row in range(number):
        tokens, tags = [], []
        for word in chance.choice(NEWS).split():
            kind = word.strip("{}")
            words = names[kind].pop().split() if kind in names else [word]
            tokens += words
            untagged = kind == "day" or kind == word
            tags += ["O" if untagged else f"{'I' if n else 'B'}-{kind}" for n in range(len(words))]
        yield {"id": row, "tokens": tokens, "tags": tags}


def write(folder: Path) -> dict[str, int]:
    """Writes the rows. Returns their number by split."""
    rows = draw_rows(0, sum(ROWS.values()))
    for split, number in ROWS.items():
        lines = [json.dumps(row) + "\n" for row in itertools.islice(rows, number)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return ROWS
