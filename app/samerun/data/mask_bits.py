"""Packs segmentation masks into as few bits per pixel as the classes need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
