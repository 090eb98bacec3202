"""Reads the idx files of MNIST and similar data sets, plain or .gz (http://yann.lecun.com/exdb/mnist).

Big-endian: two zero bytes, the type (8: uint8), the number of dimensions, each dimension as int32, then the
values.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from samerun.errors import InputError, in_short

UINT8 = 8
# File name prefixes of each split.
PREFIXES = {"train": ("train",), "validation": ("validation", "t10k", "test"), "test": ("t10k", "test")}


def is_idx(path: Path) -> bool:
    """Whether a file holds images in idx format, by its name."""
    return "-idx3-" in path.name or ".idx3-" in path.name


def images_file(folder: Path, split: str) -> Path | None:
    """The images file of a split in a folder; None if there is none."""
    files = (
        file for prefix in PREFIXES[split] for file in sorted(folder.glob(f"{prefix}-images[-.]idx3-ubyte*"))
    )
    return next((file for file in files if file.name.endswith(("ubyte", ".gz"))), None)


def labels_file(images: Path) -> Path | None:
    """The labels file, plain or .gz, that belongs to an images file; None if there is none."""
    name = images.name.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
    return next(
        (file for file in (images.with_name(name), images.with_name(f"{name}.gz")) if file.is_file()), None
    )


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array, uint8. Raises `InputError` for another type or number of dimensions, and for a truncated
    file."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({in_short(error)}); copy it again") from None
    if len(content) < 4 or content[:2] != b"\0\0":
        raise InputError(
            f"{path}: is no idx file: it begins with {content[:4]!r}, expected two zero bytes; give "
            "the files as downloaded"
        )
    if content[2] != UINT8 or content[3] != dimensions:
        raise InputError(
            f"{path}: holds values of type {content[2]} in {content[3]} dimension(s), expected "
            f"bytes (type {UINT8}) in "
            f"{dimensions}"
        )
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], ">i4")
    expected = start + math.prod(map(int, shape))
    if len(content) != expected:
        raise InputError(
            f"{path}: has {len(content)} bytes, but {' x '.join(map(str, shape))} values take "
            f"{expected}; copy it again"
        )
    if expected == start:
        raise InputError(f"{path}: no rows")
    return np.frombuffer(content, np.uint8, offset=start).reshape(tuple(map(int, shape)))
