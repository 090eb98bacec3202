"""The volumes of a run: found in folders of images and labels or in tables of paths, checked, and prepared
once (orientation, normalisation, resampling) in the cache of `datasets`.

Reading and resampling a NIfTI file takes a thousand times as long as cropping a patch from a memory-mapped
array.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samerun.console import Phase
from samerun.data import splits
from samerun.data.cache import content_hash, content_key, get_or_create
from samerun.data.tables import Table, read_table
from samerun.errors import InputError, collecting, described, listed, raise_problems
from samerun.files import paths_in
from samerun.plan import Modes
from samerun.volumes import nifti

SUFFIXES = (".nii", ".nii.gz")
# Folders of images and labels: ours, and those of the Medical Segmentation Decathlon and nnU-Net.
OURS, OF_TRAINING, OF_TEST = ("images", "labels"), ("imagesTr", "labelsTr"), ("imagesTs", "labelsTs")
SPLIT_FILE, SPLITS = "split.csv", ("train", "validation", "test")
CHANNEL, SECOND_CHANNEL = "_0000", "_0001"  # nnU-Net's suffixes of an image's channels
CACHE_VERSION = "1"
MOST_POSITIONS = 10_000  # of a class in a volume, evenly spaced; patches are centred on them


@dataclass(frozen=True)
class VolumeFile:
    """An image and its label. `id`: its name in predictions; `label`: None without one."""

    id: str
    image: Path
    label: Path | None


@dataclass(frozen=True)
class Volumes:
    """The volumes of a split. `path`: the file or folder that lists them. With several sources, `source` has
    for each volume the number of the argument's value that it comes from; `sources`: a path for each such
    number."""

    path: str
    files: list[VolumeFile]
    source: np.ndarray | None = None
    sources: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.files)

    def labels_of(self, row: int) -> tuple[()]:
        return ()  # the values of masks are not read yet

    def take(self, rows: np.ndarray) -> Volumes:
        source = None if self.source is None else self.source[rows]
        return replace(self, files=[self.files[row] for row in rows], source=source)

    @property
    def labelled(self) -> bool:
        return all(file.label is not None for file in self.files)


def find_splits(arguments: Any, modes: Modes, notes: list[str]) -> dict[str, Volumes]:
    """The volumes of the splits that `modes` need, checked to exist. Raises `InputError` with all
    problems."""
    given = arguments, modes, partial(_find, arguments), notes
    found = splits.read_needed(*given, unit="volumes", elsewhere=f", or a {SPLIT_FILE} that names some")
    raise_problems([problem for name, volumes in found.items() for problem in _missing(volumes, name)])
    return found


def _find(arguments: Any, split: str) -> Volumes | None:
    """The volumes of a split; None if there are none."""

    def read(path: str, is_own: bool, base: str | None) -> Volumes | None:
        if not os.path.isdir(path):
            required, optional = (arguments.image_column,), (arguments.label_column, arguments.id_column)
            return _from_table(read_table(path, arguments.encoding, required, optional), arguments)
        volumes = _from_folder(Path(path), split, arguments.encoding, is_own)
        if volumes is None or base is None:
            return volumes
        relative = Path(os.path.relpath(path, base))
        return replace(volumes, files=[replace(file, id=str(relative / file.id)) for file in volumes.files])

    return splits.limited(splits.read_sources(arguments, split, read, _joined), arguments, split)


def _joined(argument: str, numbered: Sequence[tuple[Volumes, int]]) -> Volumes:
    files = [file for volumes, _ in numbered for file in volumes.files]
    return Volumes(files=files, **splits.joined_fields(argument, numbered))


def _from_folder(folder: Path, split: str, encoding: str, is_own: bool) -> Volumes | None:
    """None if the folder does not have the split. `is_own`: the folder is the value of the split's own
    argument."""
    layouts = [OURS, OF_TEST if split == "test" else OF_TRAINING]
    found = [(folder / a, folder / b) for a, b in layouts if (folder / a).is_dir()]
    if not found:
        if not is_own:
            return None
        raise InputError(
            f"{folder}: has no folder {' or '.join(names[0] for names in layouts)}; images/ and "
            "labels/ are expected"
        )
    images, labels = found[0]
    names = [path.name for path in paths_in(images)]
    names = [name for name in names if name.endswith(SUFFIXES) and not name.startswith(".")]
    if not names:
        raise InputError(f"{images}: has no NIfTI files ({', '.join(SUFFIXES)})")
    if (folder / SPLIT_FILE).is_file():
        names = _names_of_split(folder, split, names, encoding)
        if not names and not is_own:
            return None
        if not names:
            raise InputError(f"{folder / SPLIT_FILE}: has no {split} volumes")
    elif not is_own and images.name != OF_TEST[0]:
        return None
    if channels := [name for name in names if _is_second_channel(name, images, labels)]:
        raise InputError(
            f"{images / channels[0]}: is a second channel; images of several channels are not supported. If "
            "it is a volume of its own, give a table of the volumes instead of the folder"
        )
    files, has_labels = [], labels.is_dir()
    for name in names:
        label = labels / name
        if not label.exists():  # nnU-Net's labels have no channel
            label = labels / name.replace(f"{CHANNEL}.nii", ".nii")
        files.append(VolumeFile(_stem(name), images / name, label if has_labels else None))
    return Volumes(str(folder), files)


def _is_second_channel(name: str, images: Path, labels: Path) -> bool:
    """Whether an image is the second channel of another, by nnU-Net's names, and not number 1 of volumes."""
    first, label = (name.replace(f"{SECOND_CHANNEL}.nii", f"{end}.nii") for end in (CHANNEL, ""))
    if first == name or (labels / name).exists():
        return False
    return (images / first).exists() or (labels / label).exists()


def _names_of_split(folder: Path, split: str, names: list[str], encoding: str) -> list[str]:
    table = read_table(str(folder / SPLIT_FILE), encoding, ("file", "split"))
    problems, selected, listed_before = [], [], set()
    rows = zip(table.columns["file"], table.columns["split"], strict=True)
    for row, (name, name_of_split) in enumerate(rows):
        if name_of_split not in SPLITS:
            problems.append(f"{table.where(row)}: split {name_of_split!r}, expected {', '.join(SPLITS)}")
        elif name not in names:
            problems.append(f"{table.where(row)}: {name} is not among the images of {folder}")
        elif name in listed_before:
            problems.append(f"{table.where(row)}: {name} is listed twice; leave one of its lines out")
        elif name_of_split == split:
            selected.append(name)
        listed_before.add(name)
    raise_problems(problems)
    return selected


def _from_table(table: Table, arguments: Any) -> Volumes:
    base, labels = Path(table.path).parent, table.columns.get(arguments.label_column)
    ids = table.columns.get(arguments.id_column)
    problems, files = [], []
    for row, image in enumerate(table.columns[arguments.image_column]):
        paths = {arguments.image_column: image}
        paths |= {} if labels is None else {arguments.label_column: labels[row]}
        for name, value in paths.items():
            if not isinstance(value, str) or not value:
                problems.append(f"{table.where(row)}: {name} is {described(value)}, expected a path")
        if not problems:
            name = _stem(Path(image).name) if ids is None else str(ids[row])
            files.append(VolumeFile(name, base / image, None if labels is None else base / labels[row]))
    raise_problems(problems)
    return Volumes(table.path, files)


def _missing(volumes: Volumes, split: str) -> list[str]:
    """Messages about missing files, and about duplicate ids of volumes to predict."""
    problems = []
    for file in volumes.files:
        if not file.image.is_file():
            problems.append(f"{file.image}: no such image")
        if file.label is None and split != "test":
            problems.append(f"{file.image}: has no label, which a {split} volume needs")
        if file.label is not None and not file.label.is_file():
            problems.append(f"{file.label}: no such file; the label of {file.image} is missing")
    counts = Counter(file.id for file in volumes.files) if split == "test" else {}
    if repeated := [name for name, count in counts.items() if count > 1]:
        problems.append(
            f"{volumes.path}: two volumes are named {repeated[0]}; give each a name of its own in --id_column"
        )
    return problems


def _stem(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".nii")


# Prepared volumes


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
    hashes = [content_hash(path) for path in paths]
    key = content_key([CACHE_VERSION, *hashes, *map(repr, spacing), repr(ignore_index)])[:40]
    folder = get_or_create("volumes", key, partial(_write_arrays, file, spacing, ignore_index))
    return Prepared(folder, file, content_key(hashes))


def _write_arrays(
    file: VolumeFile, spacing: tuple[float, ...], ignore_index: int | None, folder: Path
) -> None:
    header = nifti.read_header(file.image)
    shape = nifti.resampled_shape(header.shape, header.spacing, spacing)
    image = nifti.resample(torch.from_numpy(nifti.read_image(file.image))[None], shape)[0]
    np.save(folder / "image.npy", np.ascontiguousarray(image.numpy()))
    values: dict[int, int] = {}
    if file.label is not None:
        label = np.ascontiguousarray(nifti.read_label(file.label, ignore_index))
        np.save(folder / "label.npy", label)
        values = dict(zip(*(each.tolist() for each in np.unique(label, return_counts=True)), strict=True))
        label = nifti.resample(torch.from_numpy(label)[None], shape, "nearest-exact")[0].numpy()
        np.save(folder / "patch_label.npy", label)
        np.save(folder / "positions.npy", _positions(label))
    facts = {"shape": shape, "size": header.shape, "spacing": header.spacing, "values": values}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _positions(label: np.ndarray) -> np.ndarray:
    """(n, 4) int32: a class and the index of a voxel of it, at most MOST_POSITIONS per class, without the
    background."""
    rows = [np.empty((0, 4), dtype=np.int32)]
    for value in sorted(set(np.unique(label).tolist()) - {0, nifti.IGNORED}):
        indices = np.flatnonzero(label == value)
        number = min(len(indices), MOST_POSITIONS)
        indices = indices[np.linspace(0, len(indices) - 1, number).astype(np.int64)]
        rows.append(np.column_stack([np.full(number, value), *np.unravel_index(indices, label.shape)]))
    return np.concatenate(rows).astype(np.int32)


def check_headers(volumes_of: dict[str, Volumes], notes: list[str]) -> None:
    """Reads all headers. Raises `InputError` for files that are no volumes, and for labels whose grid differs
    from their image's."""
    problems: list[str] = []
    for file in (file for volumes in volumes_of.values() for file in volumes.files):
        with collecting(problems):
            if file.label is None:
                nifti.read_header(file.image)
            else:
                nifti.check_pair(file.image, file.label, notes)
    raise_problems(problems)


def choose_classes(train: list[Prepared], names: tuple[str, ...] | None) -> list[str]:
    """The classes, background first: the given names, or else the values of the training labels. Raises
    `InputError`."""
    values = sorted({int(value) for volume in train for value in volume.facts["values"]} - {0, nifti.IGNORED})
    if not values:
        raise InputError("no training label has a voxel of a class: all are background")
    if names is not None:
        return ["background", *names]
    if values != list(range(1, len(values) + 1)):
        raise InputError(
            f"the training labels have classes {', '.join(map(str, values))}; classes must be numbered from "
            "1 without a gap. Name them all by --class_names, or the label to be ignored by --ignore_index"
        )
    return ["background", *map(str, values)]


def check_values(volumes: list[Prepared], classes: list[str], notes: list[str]) -> None:
    """Raises `InputError` for labels with unknown classes. Notes labels without a voxel of any class."""
    problems, empty = [], []
    for volume in volumes:
        values = {int(value): count for value, count in volume.facts["values"].items()}
        for value in sorted(set(values) - {nifti.IGNORED, *range(len(classes))}):
            known = ", ".join(f"{number} {name}" for number, name in enumerate(classes))
            problems.append(
                f"{volume.file.label}: {values[value]} voxels of unknown class {value}; the classes "
                f"are {known}"
            )
        if volume.file.label is not None and not set(values) - {0, nifti.IGNORED}:
            empty.append(volume.file.label.name)
    raise_problems(problems)
    if empty:
        notes.append(
            f"{listed(empty)}: no voxel of any class; Dice and distance are undefined if none is predicted"
        )
