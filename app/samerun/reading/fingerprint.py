"""Hashes of texts and files, for cache keys and for comparing runs."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

GROUP = 4096  # texts hashed together
SAMPLES, SAMPLE_BYTES = 64, 65536  # hashed pieces of a large file
# seconds; a file may change twice within one tick of the file system's clock, so newer files count as unknown
SETTLED = 2.0


def fingerprint(parts: Iterable[str | bytes]) -> str:
    """A hash of a sequence of texts: ["ab", "c"] and ["a", "bc"] differ."""
    digest, remaining = hashlib.sha256(), iter(parts)
    while group := list(islice(remaining, GROUP)):
        encoded = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in group]
        digest.update(np.array([len(encoded), *map(len, encoded)], dtype="<u8").tobytes())
        digest.update(b"".join(encoded))
    return digest.hexdigest()


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
