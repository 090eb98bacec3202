"""Checks the files of a run's folder against the schemas of the package."""

import functools
import json
from pathlib import Path

from jsonschema import Draft202012Validator, FormatChecker

SCHEMAS = Path(__file__).parents[1] / "app" / "samerun" / "schemas"
OF_OUR_TASKS = {"classify", "titlegen", "tag", "image_classify", "segment", "segment3d"}


@functools.cache
def validator(name: str) -> Draft202012Validator:
    """The schema `name`.schema.json as a check of a file's or line's content."""
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
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
            validator(name).validate(_no_constants(path.read_text(encoding="utf-8")))
    run = folder / "run.json"
    task = json.loads(run.read_text(encoding="utf-8"))["fingerprint"].get("task") if run.exists() else None
    for name in ("history", "predictions") if task in OF_OUR_TASKS else ():
        path = folder / f"{name}.jsonl"
        if path.exists():
            found.add(path.name)
            with path.open(encoding="utf-8", newline="\n") as lines:  # a title may hold other line separators
                for line in lines:
                    validator(name).validate(_no_constants(line))
    return found


def _no_constants(text: str) -> object:
    """Parses JSON; NaN and Infinity, which other readers refuse, are errors."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
