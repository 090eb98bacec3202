"""What content is equal: a hash over texts."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

GROUP = 4096  # texts hashed together
SAMPLES, SAMPLE_BYTES = 64, 65536  # of a large file
SETTLED = 2.0  # seconds; a file changed since may change again within the resolution of a file system's clock


def fingerprint(parts: Iterable[str | bytes]) -> str:
    """A hash over texts that knows where one ends and the next begins."""
    digest, rest = hashlib.sha256(), iter(parts)
    while some := list(islice(rest, GROUP)):
        encoded = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in some]
        digest.update(np.array([len(encoded), *map(len, encoded)], dtype="<u8").tobytes())
        digest.update(b"".join(encoded))
    return digest.hexdigest()


def sample_of(path: Path) -> str:
    """A file's size and a hash of evenly spaced pieces of it, its beginning and its end among them; of all of a small file."""
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
    """A file's path, size and time of change, by which an unchanged file is known without reading it; None for one that is not
    there, or was changed in the last two seconds. Raises no error."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return f"{os.path.abspath(path)}\0{found.st_size}\0{found.st_mtime_ns}" if found.st_mtime < time.time() - SETTLED else None
