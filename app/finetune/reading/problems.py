"""What is wrong with one file of rows: collected in one pass, worded alike for every format."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from finetune.errors import InputError

SHOWN_PROBLEMS = 20


@dataclass
class Problems:
    """What is wrong with one file, in line order at the end; line 0 stands for the whole file."""

    path: str
    total: int = 0
    kept: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, message: str) -> None:
        self.total += 1
        if len(self.kept) < SHOWN_PROBLEMS:
            self.kept.append((line, message))

    def add_rows(self, lines: Sequence[int], messages: Iterable[str]) -> None:
        """Problems found after the others, of which any may come first in the file."""
        self.total += len(lines)
        self.kept.extend(islice(zip(lines, messages, strict=True), SHOWN_PROBLEMS))

    def raise_any(self) -> None:
        if not self.total:
            return
        shown = sorted(self.kept, key=lambda problem: problem[0])[:SHOWN_PROBLEMS]
        messages = [f"{self.path}:{line}: {message}" if line else f"{self.path}: {message}" for line, message in shown]
        if self.total > len(shown):
            messages.append(f"{self.path}: and {self.total - len(shown)} more problems")
        raise InputError(*messages)


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
    plain = [name if name.isprintable() and name == name.strip() and len(name) <= 40 else "" for name in names[:10]]
    shown = [clear or short(name) for clear, name in zip(plain, names, strict=False)]
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
