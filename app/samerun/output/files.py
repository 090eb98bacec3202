"""Atomic file writes, file hashes, fsync."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from samerun.errors import is_out_of_space


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file atomically: a crash leaves the old file or the new one."""
    write_text(path, as_json(content))


def as_json(content: Any) -> str:
    """The text that `write_json` writes."""
    return json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def write_text(path: Path, text: str | Iterable[str], before: Callable[[Path], None] | None = None) -> None:
    """Writes a text, or the pieces of one, atomically. Calls `before` with the complete temporary file before
    renaming it."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        with path_in_errors(path):
            with unfinished.open("x", encoding="utf-8", newline="") as file:  # "x": follows no link
                file.writelines([text] if isinstance(text, str) else text)
                file.flush()
                os.fsync(file.fileno())
            if before is not None:
                before(unfinished)
            os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_lines(path: Path) -> Iterator[Any]:
    """The values of a file of JSON lines. Texts in them may hold other line breaks, such as U+2028."""
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from map(json.loads, file)


@contextlib.contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Adds the path to errors of writing: the system names it only in errors of opening, compiled libraries
    never."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and (error.filename is None or is_out_of_space(error)):
            error.filename = str(path)
        raise
    except Exception as error:
        if not is_out_of_space(error):
            raise
        too_large = os.strerror(errno.EFBIG) in str(error)
        code = errno.EFBIG if too_large else errno.ENOSPC
        raise OSError(code, os.strerror(code), str(path)) from error


def file_record(path: Path) -> dict[str, Any]:
    """The size and hash of a file, for a manifest."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def flush(path: Path) -> None:
    """Forces a file, or a folder and everything below it, to disk."""
    for file in [*path.rglob("*"), path]:
        if not file.is_symlink():
            flush_one(file)


def flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
