"""Cache on the local disk: rows, tokens and vocabularies are created once per machine and reused by later
runs."""

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

from samerun.errors import InputError, is_out_of_space
from samerun.output.files import file_record, flush, write_json
from samerun.reading.fingerprint import file_state, fingerprint

CHECKSUMS = "checksums.json"  # in every cached folder: checksum by file name
RECORD = "record.json"

_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


def cache_folder(kind: str) -> Path:
    """A subfolder of the cache of `datasets` (HF_DATASETS_CACHE, by default in HF_HOME) or of
    `use_cache_folder`."""
    return (
        _folder.get() or Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets").expanduser()
    ) / kind


@contextmanager
def use_cache_folder(folder: Path) -> Iterator[None]:
    """A context that uses this folder as the cache."""
    before = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(before)


def get_or_create(kind: str, key: str, fill: Callable[[Path], None]) -> Path:
    """Returns a cached folder. If it does not exist yet, `fill` writes its files.

    `key`: a hash of everything that the files depend on. A new folder gets its final name once it is
    complete. A folder with missing or damaged files is filled again. Concurrent processes wait for the first
    one on a file lock. A collective would not do: it may time out, and machines need not share a disk. A
    read-only cache works if the folder is complete. Raises `InputError` if the cache cannot be written.
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
                    print(
                        f"note           {path}: this cache is damaged; it is created again", file=sys.stderr
                    )
                unfinished.mkdir()
                fill(unfinished)
                checksums = {file.name: _checksum(file) for file in unfinished.iterdir()}
                (unfinished / CHECKSUMS).write_text(json.dumps(checksums), encoding="utf-8")
                flush(unfinished)  # else a power loss could leave empty files under the final name
                shutil.rmtree(path, ignore_errors=True)
                os.rename(unfinished, path)
    except OSError as error:
        if is_out_of_space(error):
            raise OSError(
                error.errno, error.strerror, str(path.parent)
            ) from error  # callers report full disks
        reason = (error.strerror or str(error)).lower()
        raise InputError(
            f"{path.parent}: the cache cannot be written ({reason}); set HF_DATASETS_CACHE to another folder"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


def content_hash(path: str | Path) -> str:
    """The SHA-256 of a file. A machine computes it once, and again when the file changes (`file_state`)."""
    path = Path(path)
    state = file_state(path)
    if state is None:
        return file_record(path)["sha256"]
    folder = get_or_create(
        "hashes", fingerprint([state])[:40], lambda folder: write_json(folder / RECORD, file_record(path))
    )
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))["sha256"]


def _is_whole(folder: Path) -> bool:
    try:
        checksums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        return all(_checksum(folder / name) == known for name, known in checksums.items())
    except (OSError, ValueError):
        return False


def _checksum(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, xxhash.xxh3_64).hexdigest()
