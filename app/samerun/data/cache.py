"""Cache on the local disk: what is created once per machine from unchanged files, and used by later runs."""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash
from filelock import FileLock
from huggingface_hub.constants import HF_HOME

from samerun.errors import InputError, is_out_of_space
from samerun.files import file_record, flush

CHECKSUMS = "checksums.json"  # in every cached folder: checksum by file name
GROUP = 4096  # texts hashed together
SAMPLES, SAMPLE_BYTES = 64, 65536  # hashed pieces of a large file
# seconds; a file may change twice within one tick of the file system's clock, so newer files count as unknown
SETTLED = 2.0

_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


def cache_folder(kind: str) -> Path:
    """A subfolder of the cache of `datasets` (HF_DATASETS_CACHE, by default in HF_HOME) or of
    `use_cache_folder`."""
    default = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    return (_folder.get() or default.expanduser()) / kind


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
                for other in path.parent.glob(f"{key}.*"):
                    if other.suffix[1:].isdecimal():  # of a killed process
                        shutil.rmtree(other)
                unfinished.mkdir()
                try:
                    fill(unfinished)
                    checksums = {file.name: _checksum(file) for file in unfinished.iterdir()}
                    (unfinished / CHECKSUMS).write_text(json.dumps(checksums), encoding="utf-8")
                    flush(unfinished)  # else a power loss could leave empty files under the final name
                    shutil.rmtree(path, ignore_errors=True)
                    os.rename(unfinished, path)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if is_out_of_space(error):  # callers report full disks
            raise OSError(error.errno, error.strerror, str(path.parent)) from error
        reason = (error.strerror or str(error)).lower()
        raise InputError(
            f"{path.parent}: the cache cannot be written ({reason}); set HF_DATASETS_CACHE to another folder"
        ) from error
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


def content_key(parts: Iterable[str | bytes]) -> str:
    """A hash of a sequence of texts: ["ab", "c"] and ["a", "bc"] differ."""
    digest, remaining = hashlib.sha256(), iter(parts)
    while group := list(islice(remaining, GROUP)):
        encoded = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in group]
        digest.update(np.array([len(encoded), *map(len, encoded)], dtype="<u8").tobytes())
        digest.update(b"".join(encoded))
    return digest.hexdigest()


def content_hash(path: str | Path) -> str:
    """The SHA-256 of a file. A machine computes it once, and again when the file changes (`file_state`).
    Raises `InputError` for a file that cannot be read."""
    state = file_state(path)
    if state is None:
        return hash_now(path)
    key = content_key([state])[:40]
    folder = get_or_create("sha256", key, lambda folder: (folder / "hash").write_text(hash_now(path)))
    return (folder / "hash").read_text()


def hash_now(path: str | Path) -> str:
    """The SHA-256 of a file, as it is now. Raises `InputError` for a file that cannot be read."""
    try:
        return file_record(Path(path))["sha256"]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror.lower()})") from error


def file_state(path: str | Path) -> str | None:
    """`file_version`, to recognise an unchanged file without reading it. None if the file is missing or was
    changed in the last two seconds."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return file_version(path) if max(state.st_mtime, state.st_ctime) < time.time() - SETTLED else None


def file_version(path: str | Path) -> str:
    """A file's path, inode, size and times. Copying tools restore the modification time, so another content
    may have the same one; no tool sets the time of the last change (ctime)."""
    state = os.stat(path)
    facts = (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return "\0".join([os.path.abspath(path), *map(str, facts)])


def sample_of(path: Path) -> str:
    """A file's size and a hash of its content; of files above 4 MiB, a hash of evenly spaced pieces."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if size <= SAMPLES * SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for number in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"{size} bytes, sha256 {digest.hexdigest()[:16]}"
