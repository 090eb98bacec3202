"""Finds the volumes of a run: in folders of images and labels, or in tables of paths."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from samerun.data.splits import (
    LIMIT_ARGUMENTS,
    check_consistent_labels,
    common_parent,
    expand_patterns,
    read_sources,
)
from samerun.data.tables import Table, read_table, split_off
from samerun.errors import InputError, collecting, described, raise_problems
from samerun.plan import Modes
from samerun.task import Mixture

SUFFIXES = (".nii", ".nii.gz")
# Folders of images and labels: ours, and those of the Medical Segmentation Decathlon and nnU-Net.
LAYOUTS = {"": ("images", "labels"), "training": ("imagesTr", "labelsTr"), "test": ("imagesTs", "labelsTs")}
SPLIT_FILE, SPLITS = "split.csv", ("train", "validation", "test")
CHANNEL = "_0000"  # nnU-Net's suffix of an image's first channel


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

    def take(self, rows: np.ndarray) -> Volumes:
        source = None if self.source is None else self.source[rows]
        return replace(self, files=[self.files[row] for row in rows], source=source)

    def mixture(self, weights: Sequence[float] | None, patches: int, notes: list[str]) -> Mixture | None:
        """The `Mixture` of the sources by --mixing_weights, with `patches` rows per volume; None without
        weights."""
        return (
            None
            if weights is None
            else Mixture.of(np.repeat(self.source, patches), weights, self.sources, notes)
        )

    @property
    def labelled(self) -> bool:
        return all(file.label is not None for file in self.files)


def find_splits(arguments: Any, modes: Modes, notes: list[str]) -> dict[str, Volumes]:
    """The volumes of the splits that `modes` need, checked to exist. Raises `InputError` with all
    problems."""
    splits, problems = {}, []
    needed = [
        name
        for name, is_needed in zip(SPLITS, (modes.train, modes.evaluate, modes.predict), strict=True)
        if is_needed
    ]
    for split in needed:
        with collecting(problems):
            volumes = _find(arguments, split)
            if volumes is not None:
                limit = getattr(arguments, LIMIT_ARGUMENTS[split])
                splits[split] = (
                    volumes if limit is None else volumes.take(np.arange(min(limit, len(volumes))))
                )
            elif split != "validation" or not modes.train:
                problems.append(f"no {split} volumes: give --{split}_file, or a {SPLIT_FILE} that names some")
    if problems:
        raise InputError(*problems)
    if "validation" in needed and "validation" not in splits:
        kept, held_out = split_off(splits["train"], arguments.validation_split, arguments.seed)
        splits |= {"train": splits["train"].take(kept), "validation": splits["train"].take(held_out)}
        notes.append(f"{len(held_out)} training volumes are kept for validation (--validation_split)")
    problems = [problem for name, volumes in splits.items() for problem in _missing(volumes, name)]
    raise_problems(problems)
    return splits


def _find(arguments: Any, split: str) -> Volumes | None:
    """The volumes of a split, from its own argument or else from the folders of --train_file; None if there
    are none."""
    own = getattr(arguments, f"{split}_file")
    argument, sources = f"--{split if own else 'train'}_file", own or arguments.train_file
    paths = [] if sources is None else expand_patterns(argument, sources)
    if own is None:  # only folders can hold several splits
        paths = [(path, number) for path, number in paths if os.path.isdir(path)]
    base = common_parent([path for path, _ in paths if os.path.isdir(path)])
    return read_sources(paths, partial(_from_path, arguments, split, base), partial(_joined, argument))


def _joined(argument: str, numbered: Sequence[tuple[Volumes, int]]) -> Volumes:
    parts, numbers = zip(*numbered, strict=True)
    check_consistent_labels(argument, [(volumes.path, volumes.labelled) for volumes in parts])
    files = [file for volumes in parts for file in volumes.files]
    source = np.repeat(numbers, [len(volumes) for volumes in parts])
    sources = tuple(parts[numbers.index(number)].path for number in dict.fromkeys(numbers))
    return Volumes(f"{parts[0].path} and {len(parts) - 1} more", files, source, sources)


def _from_path(arguments: Any, split: str, base: str | None, path: str) -> Volumes | None:
    """`base`: the folder that the ids of a folder's volumes are relative to, None for `path`."""
    if not os.path.isdir(path):
        required, optional = (arguments.image_column,), (arguments.label_column, arguments.id_column)
        return _from_table(read_table(path, arguments.encoding, required, optional), arguments)
    volumes = _from_folder(
        Path(path), split, arguments.encoding, is_own=getattr(arguments, f"{split}_file") is not None
    )
    if volumes is None or base is None:
        return volumes
    relative = Path(os.path.relpath(path, base))
    return replace(volumes, files=[replace(file, id=str(relative / file.id)) for file in volumes.files])


def _from_folder(folder: Path, split: str, encoding: str, is_own: bool) -> Volumes | None:
    """None if the folder does not have the split. `is_own`: the folder is the value of the split's own
    argument."""
    layouts = [
        names for kind, names in LAYOUTS.items() if kind in ("", "test" if split == "test" else "training")
    ]
    images, labels = next(
        ((folder / a, folder / b) for a, b in layouts if (folder / a).is_dir()), (None, None)
    )
    if images is None:
        if not is_own:
            return None
        raise InputError(
            f"{folder}: has no folder {' or '.join(names[0] for names in layouts)}; images/ and "
            "labels/ are expected"
        )
    names = sorted(
        path.name
        for path in images.iterdir()
        if path.name.endswith(SUFFIXES) and not path.name.startswith(".")
    )
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
        raise InputError(
            f"{images / channels[0]}: is a second channel; images of several channels are not supported"
        )
    has_labels = labels.is_dir()
    return Volumes(
        str(folder),
        [
            VolumeFile(_stem(name), images / name, _label(labels, name) if has_labels else None)
            for name in names
        ],
    )


def _label(labels: Path, name: str) -> Path:
    """The path of an image's label: the same name, or the name without nnU-Net's channel."""
    same = labels / name
    return same if same.exists() or CHANNEL not in name else labels / name.replace(CHANNEL, "")


def _names_of_split(folder: Path, split: str, names: list[str], encoding: str) -> list[str]:
    table = read_table(str(folder / SPLIT_FILE), encoding, ("file", "split"))
    problems, selected = [], []
    for row, (name, name_of_split) in enumerate(
        zip(table.columns["file"], table.columns["split"], strict=True)
    ):
        if name_of_split not in SPLITS:
            problems.append(f"{table.where(row)}: split {name_of_split!r}, expected {', '.join(SPLITS)}")
        elif name not in names:
            problems.append(f"{table.where(row)}: {name} is not among the images of {folder}")
        elif name_of_split == split:
            selected.append(name)
    raise_problems(problems)
    return selected


def _from_table(table: Table, arguments: Any) -> Volumes:
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
        name = (
            table.columns[arguments.id_column][row]
            if arguments.id_column in table.columns
            else _stem(Path(image).name)
        )
        files.append(VolumeFile(str(name), base / image, None if label is None else base / label))
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
    duplicate = next(
        (name for name, count in Counter(file.id for file in volumes.files).items() if count > 1), None
    )
    if split == "test" and duplicate is not None:
        problems.append(
            f"{volumes.path}: two volumes are named {duplicate}; give each a name of its own in --id_column"
        )
    return problems


def _stem(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".nii")
