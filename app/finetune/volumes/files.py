"""Which files are a run's volumes: folders of images and labels, or files with their paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import InputError
from finetune.reading.columns import split_off
from finetune.reading.problems import described
from finetune.reading.splits import check_consistent_labels, common_parent, expand_patterns
from finetune.reading.tables import Table, read_table
from finetune.task import Mixture

SUFFIXES = (".nii", ".nii.gz")
# Folders of images and labels: ours, and those of the Medical Segmentation Decathlon and nnU-Net.
LAYOUTS = {"": ("images", "labels"), "training": ("imagesTr", "labelsTr"), "test": ("imagesTs", "labelsTs")}
SPLIT_FILE, SPLITS = "split.csv", ("train", "validation", "test")
CHANNEL = "_0000"  # nnU-Net's end of the name of an image's first channel


@dataclass(frozen=True)
class VolumeFile:
    """An image and its label, None without one. `id`: what names it in predictions."""

    id: str
    image: Path
    label: Path | None


@dataclass(frozen=True)
class Volumes:
    """The volumes of a split, and the file or folder that names them. `source`: (volumes,) of several, the number of the
    argument's value that each is of; `sources`: the first file or folder of each."""

    path: str
    files: list[VolumeFile]
    source: np.ndarray | None = None
    sources: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.files)

    def take(self, rows: np.ndarray) -> Volumes:
        source = None if self.source is None else self.source[rows]
        return replace(self, files=[self.files[row] for row in rows], source=source)

    def mixture(self, weights: Sequence[float] | None, patches: int, notes: list[str]) -> Mixture | None:
        """How --mixing_weights mixes the sources of rows that are `patches` of each volume (`Mixture.of`); None without."""
        return None if weights is None else Mixture.of(np.repeat(self.source, patches), weights, self.sources, notes)

    @property
    def labelled(self) -> bool:
        return all(file.label is not None for file in self.files)


def find_splits(arguments: Any, notes: list[str]) -> dict[str, Volumes]:
    """The volumes of the splits that a run needs; every file exists. Raises `InputError` with all problems."""
    modes, found, problems = arguments.modes, {}, []
    wanted = [name for name, needed in zip(SPLITS, (modes.train, modes.evaluate, modes.predict), strict=True) if needed]
    for split in wanted:
        try:
            volumes = _find(arguments, split)
        except InputError as error:
            problems += error.problems
            continue
        if volumes is not None:
            most = getattr(
                arguments, {"train": "max_train_samples", "validation": "max_eval_samples"}.get(split, "max_predict_samples")
            )
            found[split] = volumes if most is None else volumes.take(np.arange(min(most, len(volumes))))
        elif split != "validation" or not modes.train:
            problems.append(f"no {split} volumes: give --{split}_file, or a {SPLIT_FILE} that names some")
    if problems:
        raise InputError(*problems)
    if "validation" in wanted and "validation" not in found:
        kept, held_out = split_off(found["train"], arguments.validation_split, arguments.seed)
        found |= {"train": found["train"].take(kept), "validation": found["train"].take(held_out)}
        notes.append(f"{len(held_out)} training volumes are kept for validation (--validation_split)")
    problems = [problem for name, volumes in found.items() for problem in _missing(volumes, name)]
    if problems:
        raise InputError(*problems)
    return found


def _find(arguments: Any, split: str) -> Volumes | None:
    """A split's volumes: of its own argument, or of a folder of several splits that --train_file names."""
    own = getattr(arguments, f"{split}_file")
    argument, named = f"--{split if own else 'train'}_file", own or arguments.train_file
    paths = [] if named is None else expand_patterns(argument, named)
    if own is None:  # a table is of one split
        paths = [(path, number) for path, number in paths if os.path.isdir(path)]
    base = common_parent([path for path, _ in paths if os.path.isdir(path)])
    found, problems = [], []
    for path, number in paths:
        try:
            found.append((_of_path(arguments, split, base, path), number))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems[:20])
    found = [(volumes, number) for volumes, number in found if volumes is not None]
    return _joined(argument, found) if len(found) > 1 else next((volumes for volumes, _ in found), None)


def _joined(argument: str, found: Sequence[tuple[Volumes, int]]) -> Volumes:
    parts, numbers = zip(*found, strict=True)
    check_consistent_labels(argument, [(each.path, each.labelled) for each in parts])
    files = [file for each in parts for file in each.files]
    source = np.repeat(numbers, [len(each) for each in parts])
    sources = tuple(parts[numbers.index(number)].path for number in dict.fromkeys(numbers))
    return Volumes(f"{parts[0].path} and {len(parts) - 1} more", files, source, sources)


def _of_path(arguments: Any, split: str, base: str | None, path: str) -> Volumes | None:
    """`base`: the folder from which a folder's volumes are named, None for itself."""
    if not os.path.isdir(path):
        needed, columns = (arguments.image_column,), (arguments.label_column, arguments.id_column)
        return _of_table(read_table(path, arguments.encoding, needed, columns), arguments)
    volumes = _of_folder(Path(path), split, arguments.encoding, is_own=getattr(arguments, f"{split}_file") is not None)
    if volumes is None or base is None:
        return volumes
    place = Path(os.path.relpath(path, base))
    return replace(volumes, files=[replace(file, id=str(place / file.id)) for file in volumes.files])


def _of_folder(folder: Path, split: str, encoding: str, is_own: bool) -> Volumes | None:
    """`is_own`: whether the folder is this split's, or that of several, which a split.csv divides."""
    layouts = [names for kind, names in LAYOUTS.items() if kind in ("", "test" if split == "test" else "training")]
    images, labels = next(((folder / a, folder / b) for a, b in layouts if (folder / a).is_dir()), (None, None))
    if images is None:
        if not is_own:
            return None
        raise InputError(
            f"{folder}: has no folder {' or '.join(names[0] for names in layouts)}; images/ and labels/ are expected"
        )
    names = sorted(path.name for path in images.iterdir() if path.name.endswith(SUFFIXES) and not path.name.startswith("."))
    if not names:
        raise InputError(f"{images}: has no NIfTI files ({', '.join(SUFFIXES)})")
    if (folder / SPLIT_FILE).is_file():
        names = _names_of_split(folder, split, names, encoding)
        if not names and not is_own:
            return None
        if not names:
            raise InputError(f"{folder / SPLIT_FILE}: has no {split} volumes")
    elif not is_own and images.name != LAYOUTS["test"][0]:
        return None
    channels = [name for name in names if _stem(name).endswith("_0001")]
    if channels:
        raise InputError(f"{images / channels[0]}: is a second channel; images of several channels are not supported")
    has_labels = labels.is_dir()
    return Volumes(
        str(folder), [VolumeFile(_stem(name), images / name, _label(labels, name) if has_labels else None) for name in names]
    )


def _label(labels: Path, name: str) -> Path:
    """The label of an image: of the same name, or without nnU-Net's channel."""
    same = labels / name
    return same if same.exists() or CHANNEL not in name else labels / name.replace(CHANNEL, "")


def _names_of_split(folder: Path, split: str, names: list[str], encoding: str) -> list[str]:
    table = read_table(str(folder / SPLIT_FILE), encoding, ("file", "split"))
    problems, found = [], []
    for row, (name, place) in enumerate(zip(table.columns["file"], table.columns["split"], strict=True)):
        if place not in SPLITS:
            problems.append(f"{table.where(row)}: split {place!r}, expected {', '.join(SPLITS)}")
        elif name not in names:
            problems.append(f"{table.where(row)}: {name} is not among the images of {folder}")
        elif place == split:
            found.append(name)
    if problems:
        raise InputError(*problems[:20])
    return found


def _of_table(table: Table, arguments: Any) -> Volumes:
    base, labels = Path(table.path).parent, table.columns.get(arguments.label_column)
    problems, files = [], []
    for row, image in enumerate(table.columns[arguments.image_column]):
        label = None if labels is None else labels[row]
        for name, value in (
            (arguments.image_column, image),
            *([(arguments.label_column, label)] if labels is not None else []),
        ):
            if not isinstance(value, str) or not value:
                problems.append(f"{table.where(row)}: {name} is {described(value)}, expected a path")
        if problems:
            continue
        name = table.columns[arguments.id_column][row] if arguments.id_column in table.columns else _stem(Path(image).name)
        files.append(VolumeFile(str(name), base / image, None if label is None else base / label))
    if problems:
        raise InputError(*problems[:20])
    return Volumes(table.path, files)


def _missing(volumes: Volumes, split: str) -> list[str]:
    """Files that are not there, and ids that stand twice in what is predicted."""
    found = []
    for file in volumes.files:
        if not file.image.is_file():
            found.append(f"{file.image}: no such image")
        if file.label is None and split != "test":
            found.append(f"{file.image}: has no label, which a {split} volume needs")
        if file.label is not None and not file.label.is_file():
            found.append(f"{file.label}: no such file; the label of {file.image} is missing")
    ids = [file.id for file in volumes.files]
    twice = next((name for name in ids if ids.count(name) > 1), None)
    if split == "test" and twice is not None:
        found.append(f"{volumes.path}: two volumes are named {twice}; give each a name of its own in --id_column")
    return found[:20]


def _stem(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".nii")
