"""Folders with one subfolder of pictures per class, as for ImageFolder of torchvision and `datasets`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from PIL import Image

from finetune.errors import InputError
from finetune.reading.problems import listed

SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


@cache
def picture_extensions() -> frozenset[str]:
    """The extensions that Pillow can open, in lower case."""
    return frozenset(name for name, kind in Image.registered_extensions().items() if kind in Image.OPEN)


def pictures_below(folder: Path, notes: list[str]) -> list[Path]:
    """All pictures below a folder by extension, sorted by path. Skips hidden files, and other files with a note."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    pictures = [path for path in files if path.suffix.lower() in picture_extensions()]
    others = [path.name for path in files if path.suffix.lower() not in picture_extensions()]
    if others:
        notes.append(f"{folder}: {len(others)} file(s) without a picture's extension are left out: {listed(others)}")
    return pictures


def class_folders(folder: Path, notes: list[str]) -> tuple[list[Path], list[str] | None]:
    """(pictures, class names). A picture's class is the name of its subfolder; the class names are None if the pictures are in
    the folder itself. Raises `InputError` for an empty folder or class, and for pictures beside the class folders."""
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not subfolders:
        pictures = pictures_below(folder, notes)
        if not pictures:
            raise InputError(f"{folder}: holds no pictures; expected a folder for each class, with pictures in it")
        return pictures, None
    if {path.name.lower() for path in subfolders} <= SPLITS:
        splits = ", ".join(path.name for path in subfolders)
        raise InputError(
            f"{folder}: holds splits ({splits}), not classes; give each by itself, such as --train_file {subfolders[0]}"
        )
    beside = [path.name for path in sorted(folder.iterdir()) if path.suffix.lower() in picture_extensions() and path.is_file()]
    if beside:
        raise InputError(f"{folder}: holds pictures beside the folders of classes ({listed(beside)}); move them into a class")
    pictures, names, empty = [], [], []
    for subfolder in subfolders:
        found = pictures_below(subfolder, notes)
        if not found:
            empty.append(f"{subfolder}: holds no pictures; remove the folder, or put the pictures of this class there")
        pictures += found
        names += [subfolder.name] * len(found)
    if empty:
        raise InputError(*empty)
    return pictures, names
