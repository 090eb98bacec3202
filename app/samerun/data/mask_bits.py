"""Packs segmentation masks into as few bits per pixel as the classes need, and names their files."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

LONGEST_NAME = 200  # bytes of a file name without suffix; file systems allow 255
NOT_IN_NAMES = re.compile("[/\x00-\x1f\x7f\ud800-\udfff]")


def file_names(ids: Sequence[str], suffix: str) -> list[str]:
    """A file name for each row, all different: its id, with _ for characters that file names cannot have, cut
    if it is very long. A row whose name an earlier row has gets its row number appended."""
    stems = [
        NOT_IN_NAMES.sub("_", name).encode()[:LONGEST_NAME].decode(errors="ignore") or "_" for name in ids
    ]
    names: dict[str, None] = {}
    for row, stem in enumerate(stems):
        name = stem
        if stem in names:
            name = f"{stem}_{row}"
            while name in names or name in stems:
                name = f"{name}_{row}"
        names[name] = None
    return [f"{name}{suffix}" for name in names]


def bits(num_classes: int) -> int:
    return max(1, (num_classes - 1).bit_length())


def packed_bytes(num_pixels: int, num_classes: int) -> int:
    """Size of a mask packed by `pack`."""
    return bits(num_classes) * -(-num_pixels // 8)


def pack(mask: np.ndarray, num_classes: int, room: int) -> np.ndarray:
    """(room,) uint8: the class numbers of a uint8 mask as bit planes, one after the other. `room`: at least
    `packed_bytes`."""
    planes = [np.packbits(mask.ravel() >> bit & 1) for bit in range(bits(num_classes))]
    return np.concatenate([np.pad(plane, (0, room // len(planes) - len(plane))) for plane in planes])


def unpack(packed: np.ndarray, size: Sequence[int], num_classes: int) -> np.ndarray:
    """The inverse of `pack`, for a mask of this size."""
    planes = np.split(packed, bits(num_classes))
    values = sum(np.unpackbits(plane, count=int(np.prod(size))) << bit for bit, plane in enumerate(planes))
    return np.asarray(values, dtype=np.uint8).reshape(size)
