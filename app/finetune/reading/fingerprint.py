"""What content is equal: a hash over texts. Level 1."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import islice

import numpy as np

GROUP = 4096  # texts hashed together


def fingerprint(parts: Iterable[str | bytes]) -> str:
    """A hash over texts that knows where one ends and the next begins."""
    digest, rest = hashlib.sha256(), iter(parts)
    while some := list(islice(rest, GROUP)):
        encoded = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in some]
        add_group(digest, np.array(list(map(len, encoded))), b"".join(encoded))
    return digest.hexdigest()


def add_group(digest: hashlib._Hash, lengths: np.ndarray, joined: bytes | memoryview) -> None:
    """Adds the next `GROUP` texts (the last group may be smaller): their lengths in bytes, and their bytes, joined."""
    digest.update(np.array([len(lengths), *lengths], dtype="<u8").tobytes())
    digest.update(joined)
