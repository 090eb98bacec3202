"""Folders of pictures: a folder a class, as torchvision's and datasets' ImageFolder have them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from PIL import Image

from finetune.errors import InputError
from finetune.reading.problems import listed

SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


@cache
def picture_extensions() -> frozenset[str]:
    """The extensions of what Pillow opens, in lower case."""
    return frozenset(name for name, kind in Image.registered_extensions().items() if kind in Image.OPEN)


def pictures_below(folder: Path, notes: list[str]) -> list[Path]:
    """All pictures below a folder, by extension, in the order of their paths; hidden files are passed over, other files
    noted."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    found = [path for path in files if path.suffix.lower() in picture_extensions()]
    others = [path.name for path in files if path.suffix.lower() not in picture_extensions()]
    if others:
        notes.append(f"{folder}: {len(others)} file(s) are left out, which are no pictures by their names: {listed(others)}")
    return found


def class_folders(folder: Path, notes: list[str]) -> tuple[list[Path], list[str] | None]:
    """(pictures, the class of each): those of each subfolder, whose name is the class. None for the classes where the pictures
    lie in the folder itself. Raises `InputError` for an empty folder or class, and for pictures beside the classes' folders."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        pictures = pictures_below(folder, notes)
        if not pictures:
            raise InputError(f"{folder}: holds no pictures; expected a folder for each class, with pictures in it")
        return pictures, None
    if {path.name.lower() for path in classes} <= SPLITS:
        found = ", ".join(path.name for path in classes)
        raise InputError(
            f"{folder}: holds splits ({found}), not classes; give each by itself, such as --train_file {classes[0]}"
        )
    beside = [path.name for path in sorted(folder.iterdir()) if path.suffix.lower() in picture_extensions() and path.is_file()]
    if beside:
        raise InputError(f"{folder}: holds pictures beside the folders of classes ({listed(beside)}); move them into a class")
    pictures, names, empty = [], [], []
    for place in classes:
        found = pictures_below(place, notes)
        empty += [] if found else [f"{place}: holds no pictures; remove the folder, or put the pictures of this class there"]
        pictures += found
        names += [place.name] * len(found)
    if empty:
        raise InputError(*empty)
    return pictures, names
