"""What is made once on a machine and found by every later start: rows, tokens, vocabularies."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import xxhash
from filelock import FileLock
from huggingface_hub.constants import HF_HOME

from finetune.errors import InputError, is_out_of_space
from finetune.output.files import flush

CHECKSUMS = "checksums.json"  # in every folder: of each of its files


_below: ContextVar[Path | None] = ContextVar("below", default=None)


def cache_folder(kind: str) -> Path:
    """A folder in the cache of `datasets`: below HF_DATASETS_CACHE, or else below HF_HOME. Or in the one of `kept_below`."""
    return (_below.get() or Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets").expanduser()) / kind


@contextmanager
def kept_below(folder: Path) -> Iterator[None]:
    """Meanwhile everything is kept below this folder, and can be removed with it."""
    before = _below.set(folder)
    try:
        yield
    finally:
        _below.reset(before)


def kept(kind: str, key: str, fill: Callable[[Path], None]) -> Path:
    """The folder that `fill` writes its files into, unless that was done before. `key`: a hash of everything that the files
    depend on.

    The folder is whole or absent: it is renamed when it is complete, and made anew when a file in it is missing or damaged.
    Processes that start together wait on a file lock for the first, not in a collective: this may take longer than a process
    group waits, and machines need not share a disk. A complete folder is found in a read-only cache, too. Raises `InputError`
    if the cache cannot be written.
    """
    path = cache_folder(kind) / key
    if _is_whole(path):
        return path
    unfinished = path.with_name(f"{key}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not _is_whole(path):
                if path.exists():
                    print(f"note           {path}: this cache is damaged; it is made anew", file=sys.stderr)
                unfinished.mkdir()
                fill(unfinished)
                checksums = {file.name: _checksum(file) for file in unfinished.iterdir()}
                (unfinished / CHECKSUMS).write_text(json.dumps(checksums), encoding="utf-8")
                flush(unfinished)  # otherwise a power loss could leave empty files under the final name
                shutil.rmtree(path, ignore_errors=True)
                os.rename(unfinished, path)
    except OSError as error:
        if is_out_of_space(error):
            raise OSError(error.errno, error.strerror, str(path.parent)) from error  # reported like every full disk
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"{path.parent}: the cache cannot be written ({reason}); set HF_DATASETS_CACHE to another") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


def _is_whole(folder: Path) -> bool:
    try:
        checksums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        return all(_checksum(folder / name) == known for name, known in checksums.items())
    except (OSError, ValueError):
        return False


def _checksum(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, xxhash.xxh3_64).hexdigest()
