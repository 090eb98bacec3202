"""Problems of a file of rows, collected in one pass, and the common wording of messages."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from samerun.errors import InputError

SHOWN = 20  # problems in an error
UNITS = {"parquet": " row ", "json": " element "}  # other kinds of files count lines


@dataclass
class Problems:
    """Collects the problems of one file, in the order of its rows."""

    path: str
    kind: str
    total: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, number: int, message: str) -> None:
        """`number`: of the row, as in `location`; 0 for the whole file."""
        self.total += 1
        if len(self.messages) < SHOWN:
            self.messages.append(
                f"{location(self.path, self.kind, number) if number else self.path}: {message}"
            )

    def raise_any(self) -> None:
        if self.total > len(self.messages):
            self.messages.append(f"{self.path}: and {self.total - len(self.messages)} more problems")
        if self.total:
            raise InputError(*self.messages)


def raise_problems(problems: Sequence[str], *advice: str) -> None:
    """Raises `InputError` with the first `SHOWN` problems and with `advice`, unless there are no problems."""
    if problems:
        raise InputError(*problems[:SHOWN], *more(len(problems)), *advice)


def more(count: int) -> list[str]:
    """A last line for an error with more than `SHOWN` problems: "... and 5 more"."""
    return [f"... and {count - SHOWN} more"] if count > SHOWN else []


def location(path: str, kind: str, number: int) -> str:
    """The location of a row for messages: "train.csv:17", "train.json element 3", "train.parquet row 17"."""
    return f"{path}{UNITS.get(kind, ':')}{number}"


def not_found(what: str, name: str, existing: Sequence[str]) -> str:
    """The message for a missing column or field. `what`: "column" or "field"."""
    near = nearest(name, existing)
    hint = f"did you mean {quoted(near)}? Rename it" if near else "rename one of them"
    names = listed(existing) or "none"
    return (
        f"{what} {quoted(name)} not found; found: {names}; {hint} or pass its name with the "
        "--..._column argument"
    )


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The most similar one of `names`, ignoring case and outer spaces; None if none is similar."""
    folded = {other.strip().casefold(): other for other in names}
    close = difflib.get_close_matches(name, names, n=1)
    return folded.get(name.strip().casefold()) or (close[0] if close else None)


def listed(names: Sequence[str]) -> str:
    """At most ten names separated by commas; unusual ones in quotes."""
    is_plain = [name.isprintable() and name == name.strip() and 0 < len(name) <= 40 for name in names[:10]]
    shown = [name if plain else quoted(name) for name, plain in zip(names, is_plain, strict=False)]
    return ", ".join(shown) + (f", ... {len(names)} in all" if len(names) > 10 else "")


def quoted(text: str) -> str:
    """A text in quotes, cut to 40 characters."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def described(value: object) -> str:
    """A cell of the wrong type, with its type; "missing" for None."""
    if value is None:
        return "missing"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
