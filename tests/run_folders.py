"""Reads the files of a run's folder, and checks them against the schemas of the package."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator, FormatChecker

SCHEMAS = Path(__file__).parents[1] / "app" / "samerun" / "schemas"
OF_OUR_TASKS = {"classify", "titlegen", "tag", "image_classify", "segment", "segment3d"}


@functools.cache
def validator(name: str) -> Draft202012Validator:
    """The schema `name`.schema.json as a check of a file's or line's content."""
    schema = read_json(SCHEMAS / f"{name}.schema.json")
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, format_checker=FormatChecker())


def check_run_folder(folder: Path) -> set[str]:
    """Checks each file that a schema describes. Returns the names of those that exist. Lines only of our own
    tasks: another task's may hold anything."""
    found = set()
    for name in ("run", "status", "metrics"):
        path = folder / f"{name}.json"
        if path.exists():
            found.add(path.name)
            validator(name).validate(read_json(path))
    run = folder / "run.json"
    task = read_json(run)["fingerprint"].get("task") if run.exists() else None
    for name in ("history", "predictions") if task in OF_OUR_TASKS else ():
        path = folder / f"{name}.jsonl"
        if path.exists():
            found.add(path.name)
            with path.open(encoding="utf-8", newline="\n") as lines:  # a title may hold other line separators
                for line in lines:
                    validator(name).validate(as_json(line))
    return found


def contents(folder: Path) -> dict[str, str]:
    """Name -> hash of each file below a folder. Leaves out links, caches, and what every run opens."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    named = {path.relative_to(folder).as_posix(): path for path in files}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in named.items()
        if path.name not in (".lock", ".predictions") and not name.startswith("cache/")
    }


def read_json(path: Path) -> Any:
    return as_json(path.read_text(encoding="utf-8"))


def as_json(text: str) -> Any:
    """Parses JSON; NaN and Infinity, which other readers refuse, are errors."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
