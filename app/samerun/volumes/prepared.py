"""Prepares volumes once (orientation, normalisation, resampling) and caches them in the cache of `datasets`.

Reading and resampling a NIfTI file takes a thousand times as long as cropping a patch from a memory-mapped
array.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from samerun.data.cache import content_hash, fingerprint, get_or_create
from samerun.errors import InputError, collecting, listed, raise_problems
from samerun.output.progress import Phase
from samerun.volumes.files import VolumeFile, Volumes
from samerun.volumes.nifti import (
    IGNORED,
    check_pair,
    read_header,
    read_image,
    read_label,
    resample,
    resampled_shape,
)

CACHE_VERSION = "1"
MOST_POSITIONS = 10_000  # of a class in a volume, evenly spaced; patches are centred on them


@dataclass(frozen=True)
class Prepared:
    """A volume as arrays on disk in canonical orientation (RAS). They are memory-mapped only while in use: a
    mapping is an open file.

    `folder` holds image.npy, (x, y, z) float32 in the run's spacing; label.npy, (x, y, z) uint8 in the file's
    spacing; patch_label.npy, the label in the run's spacing; positions.npy, (n, 4) int32: a class and the
    index of a voxel of it.
    """

    folder: Path
    file: VolumeFile
    content: str  # a hash of the files
    files: tuple[str, ...] = ()  # a hash of each: the image, then the label

    @cached_property
    def facts(self) -> dict:
        """`shape`: size in the run's spacing; `size`, `spacing`: those of the file; `values`: label -> number
        of voxels."""
        return json.loads((self.folder / "facts.json").read_text(encoding="utf-8"))

    @property
    def image(self) -> np.ndarray:
        return np.load(self.folder / "image.npy", mmap_mode="r")

    @property
    def label(self) -> np.ndarray:
        return np.load(self.folder / "label.npy", mmap_mode="r")

    @property
    def patch_label(self) -> np.ndarray:
        return np.load(self.folder / "patch_label.npy", mmap_mode="r")

    @cached_property
    def positions(self) -> np.ndarray:
        return np.load(self.folder / "positions.npy")


def prepare(volumes: Volumes, spacing: tuple[float, ...], ignore_index: int | None) -> list[Prepared]:
    """Prepares the volumes that are not in the cache. Raises `InputError` with the problems of all files."""
    prepared, problems = [], []
    with Phase(f"preparing {volumes.path}", "volumes", len(volumes)) as bar:
        for file in volumes.files:
            with collecting(problems):
                prepared.append(_prepare(file, spacing, ignore_index))
            bar.update()
    raise_problems(problems)
    return prepared


def _prepare(file: VolumeFile, spacing: tuple[float, ...], ignore_index: int | None) -> Prepared:
    paths = [file.image, *([file.label] if file.label is not None else [])]
    hashes = tuple(content_hash(path) for path in paths)
    key = fingerprint([CACHE_VERSION, *hashes, *map(repr, spacing), repr(ignore_index)])[:40]
    folder = get_or_create("volumes", key, partial(_write_arrays, file, spacing, ignore_index))
    return Prepared(folder, file, fingerprint(hashes), hashes)


def _write_arrays(
    file: VolumeFile, spacing: tuple[float, ...], ignore_index: int | None, folder: Path
) -> None:
    header = read_header(file.image)
    shape = resampled_shape(header.shape, header.spacing, spacing)
    image = resample(torch.from_numpy(read_image(file.image))[None], shape)[0]
    np.save(folder / "image.npy", np.ascontiguousarray(image.numpy()))
    values: dict[int, int] = {}
    if file.label is not None:
        label = np.ascontiguousarray(read_label(file.label, ignore_index))
        np.save(folder / "label.npy", label)
        values = {
            int(value): int(count) for value, count in zip(*np.unique(label, return_counts=True), strict=True)
        }
        label = resample(torch.from_numpy(label)[None], shape, "nearest-exact")[0].numpy()
        np.save(folder / "patch_label.npy", label)
        np.save(folder / "positions.npy", _positions(label))
    facts = {"shape": shape, "size": header.shape, "spacing": header.spacing, "values": values}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _positions(label: np.ndarray) -> np.ndarray:
    """(n, 4) int32: a class and the index of a voxel of it, at most MOST_POSITIONS per class, without the
    background."""
    rows = [np.empty((0, 4), dtype=np.int32)]
    for value in np.unique(label):
        if value not in (0, IGNORED):
            indices = np.flatnonzero(label == value)
            indices = indices[
                np.linspace(0, len(indices) - 1, min(len(indices), MOST_POSITIONS)).astype(np.int64)
            ]
            rows.append(
                np.column_stack([np.full(len(indices), value), *np.unravel_index(indices, label.shape)])
            )
    return np.concatenate(rows).astype(np.int32)


def check_headers(splits: dict[str, Volumes], notes: list[str]) -> None:
    """Reads all headers. Raises `InputError` for files that are no volumes, and for labels whose grid differs
    from their image's."""
    problems: list[str] = []
    for file in (file for volumes in splits.values() for file in volumes.files):
        check: Callable[[], object] = partial(read_header, file.image)
        if file.label is not None:
            check = partial(check_pair, file.image, file.label, notes)
        with collecting(problems):
            check()
    raise_problems(problems)


def choose_classes(train: list[Prepared], names: tuple[str, ...] | None) -> list[str]:
    """The classes, background first: the given names, or else the values of the training labels. Raises
    `InputError`."""
    values = sorted({int(value) for volume in train for value in volume.facts["values"]} - {0, IGNORED})
    if not values:
        raise InputError("no training label has a voxel of a class: all are background")
    if names is not None:
        return ["background", *names]
    if values != list(range(1, len(values) + 1)):
        raise InputError(
            f"the training labels have classes {', '.join(map(str, values))}; classes must be "
            "numbered from 1 without a gap. "
            "Name them all by --class_names, or the label to be ignored by --ignore_index"
        )
    return ["background", *map(str, values)]


def check_values(volumes: list[Prepared], classes: list[str], notes: list[str]) -> None:
    """Raises `InputError` for labels with unknown classes. Notes labels without a voxel of any class."""
    problems, empty = [], []
    for volume in volumes:
        values = {int(value): count for value, count in volume.facts["values"].items()}
        for value in sorted(set(values) - {IGNORED, *range(len(classes))}):
            known = ", ".join(f"{number} {name}" for number, name in enumerate(classes))
            problems.append(
                f"{volume.file.label}: {values[value]} voxels of unknown class {value}; the classes "
                f"are {known}"
            )
        if volume.file.label is not None and not set(values) - {0, IGNORED}:
            empty.append(volume.file.label.name)
    raise_problems(problems)
    if empty:
        notes.append(
            f"{listed(empty)}: no voxel of any class; Dice and distance are undefined if none is predicted"
        )
