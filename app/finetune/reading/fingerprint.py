"""What content is equal: a hash over texts."""

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
        digest.update(np.array([len(encoded), *map(len, encoded)], dtype="<u8").tobytes())
        digest.update(b"".join(encoded))
    return digest.hexdigest()
