"""What is wrong with one file of rows: collected in one pass, worded alike for every format."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from finetune.errors import InputError

SHOWN_PROBLEMS = 20
PLACES = {"parquet": " row ", "json": " element "}  # what the rows of a kind of file are counted in, if not lines


@dataclass
class Problems:
    """What is wrong with one file of a kind, in the order of its rows; place 0 stands for the whole file."""

    path: str
    kind: str
    total: int = 0
    kept: list[str] = field(default_factory=list)

    def add(self, number: int, message: str) -> None:
        self.total += 1
        if len(self.kept) < SHOWN_PROBLEMS:
            self.kept.append(f"{place(self.path, self.kind, number) if number else self.path}: {message}")

    def raise_any(self) -> None:
        if self.total > len(self.kept):
            self.kept.append(f"{self.path}: and {self.total - len(self.kept)} more problems")
        if self.total:
            raise InputError(*self.kept)


def place(path: str, kind: str, number: int) -> str:
    """A row in words: "train.csv:17", "train.json element 3", "train.parquet row 17"."""
    return f"{path}{PLACES.get(kind, ':')}{number}"


def not_found(what: str, name: str, found: Sequence[str]) -> str:
    """The message for a required column or field that a file lacks."""
    near = nearest(name, found)
    hint = f"did you mean {short(near)}? Rename it" if near else "rename one of them"
    found_names = listed(found) or "none"
    return f"{what} {short(name)} not found; found: {found_names}; {hint} or pass its name with the --..._column argument"


def nearest(name: str, found: Sequence[str]) -> str | None:
    """The name that was probably meant: equal but for case and spaces, or spelt much like it."""
    folded = {other.strip().casefold(): other for other in found}
    close = difflib.get_close_matches(name, found, n=1)
    return folded.get(name.strip().casefold()) or (close[0] if close else None)


def listed(names: Sequence[str]) -> str:
    """Names as they are where that is clear, in quotes where it is not; the first ten of many."""
    is_clear = [name.isprintable() and name == name.strip() and 0 < len(name) <= 40 for name in names[:10]]
    shown = [name if clear else short(name) for name, clear in zip(names, is_clear, strict=False)]
    return ", ".join(shown) + (f", ... {len(names)} in all" if len(names) > 10 else "")


def short(text: str) -> str:
    """A text of the user's in quotes, its first 37 characters if it is long."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def described(value: object) -> str:
    """A cell that is no text, with its type."""
    if value is None:
        return "missing"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
