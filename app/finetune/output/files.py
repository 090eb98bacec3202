"""Files that are whole or absent."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import is_out_of_space


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file so that it is the old one or the new one, never half of it."""
    write_text(path, as_json(content))


def as_json(content: Any) -> str:
    """The text that `write_json` writes."""
    return json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def write_text(path: Path, text: str | Iterable[str], before: Callable[[Path], None] | None = None) -> None:
    """As `write_json`, for a text or its pieces. `before` is called with the written file before it takes its place."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        with naming(path):
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


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Has an error of writing name the file: the system does so when it is opened only, other languages' libraries never."""
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
    """A file's size and hash, as manifests hold them."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def flush(place: Path) -> None:
    """Forces a file, or a folder and everything below it, to disk."""
    for path in [*place.rglob("*"), place]:
        if not path.is_symlink():
            flush_one(path)


def flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
