"""Standard input as a data file: `cat new.csv | python app/classify.py --do_predict --test_file - ...`."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from typing import Any

from samerun.arguments.parsing import SpaceSeparated
from samerun.errors import InputError
from samerun.files import temporary_folder

NAMES = ("-", "/dev/stdin")
HEAD = 2**16  # bytes that decide the kind of file


def with_standard_input(arguments: Any, names: list[str]) -> Any:
    """Copies standard input to a temporary file, because rows are read several times, and puts its path into
    the arguments.

    `names`: the arguments that may name standard input. Content that begins with "{" is jsonl, with "[" json,
    otherwise csv. Raises `InputError` if several arguments name it, or if there are several processes: only
    one would get it.
    """
    values = {name: getattr(arguments, name) for name in names}
    values = {
        name: value if isinstance(value, SpaceSeparated) else (value,) for name, value in values.items()
    }
    from_input = [name for name, paths in values.items() for path in paths if path in NAMES]
    if not from_input:
        return arguments
    if len(from_input) > 1:
        raise InputError(
            f"{' and '.join(f'--{name}' for name in from_input)} are standard input; only one can be"
        )
    (name,) = from_input
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError(
            f"--{name} -: only one process gets standard input; write it to a file, or launch with python"
        )
    head = sys.stdin.buffer.read(HEAD)
    kind = {b"{": "jsonl", b"[": "json"}.get(head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1], "csv")
    path = str(temporary_folder("standard_input_") / f"rows.{kind}")
    with open(path, "wb") as file:
        file.write(head)
        shutil.copyfileobj(sys.stdin.buffer, file)
    value = SpaceSeparated(path if value in NAMES else value for value in values[name])
    return dataclasses.replace(
        arguments, **{name: value if isinstance(getattr(arguments, name), SpaceSeparated) else path}
    )
