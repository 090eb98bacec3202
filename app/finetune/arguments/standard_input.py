"""A data file that is standard input: `cat new.csv | python app/classify.py --do_predict --test_file - ...`."""

from __future__ import annotations

import atexit
import dataclasses
import os
import shutil
import sys
import tempfile
from typing import Any

from finetune.arguments.parsing import Each
from finetune.errors import InputError

NAMES = ("-", "/dev/stdin")
HEAD = 2**16  # bytes that show what kind of file it is


def with_standard_input(arguments: Any, names: list[str]) -> Any:
    """The arguments with a temporary file in place of standard input, where one of these arguments names it: rows are read
    more than once. It is JSON lines if it begins with "{", a JSON array if with "[", and csv otherwise.

    Raises `InputError` if several arguments name it, or several processes were launched: one of them would get it.
    """
    values = {name: getattr(arguments, name) for name in names}
    each = [(name, value) for name in names for value in (values[name] if isinstance(values[name], Each) else [values[name]])]
    given = [name for name, value in each if value in NAMES]
    if not given:
        return arguments
    if len(given) > 1:
        raise InputError(f"{' and '.join(f'--{name}' for name in given)} are standard input; only one can be")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError(f"--{given[0]} -: only one process gets standard input; write it to a file, or launch with python")
    folder = tempfile.mkdtemp(prefix="standard_input_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    head = sys.stdin.buffer.read(HEAD)
    kind = {b"{": "jsonl", b"[": "json"}.get(head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1], "csv")
    path = os.path.join(folder, f"rows.{kind}")
    with open(path, "wb") as file:
        file.write(head)
        shutil.copyfileobj(sys.stdin.buffer, file)
    several = isinstance(values[given[0]], Each)
    value = Each(path if value in NAMES else value for value in values[given[0]]) if several else path
    return dataclasses.replace(arguments, **{given[0]: value})
