"""Folders with one subfolder of images per class, as for ImageFolder of torchvision and `datasets`."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from PIL import Image

from samerun.errors import InputError, listed

SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


@cache
def image_extensions() -> frozenset[str]:
    """The extensions that Pillow can open, in lower case."""
    return frozenset(name for name, kind in Image.registered_extensions().items() if kind in Image.OPEN)


def images_below(folder: Path, notes: list[str]) -> list[Path]:
    """All images below a folder by extension, sorted by path. Skips hidden files, and other files with a
    note."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    images = [path for path in files if path.suffix.lower() in image_extensions()]
    others = [path.name for path in files if path.suffix.lower() not in image_extensions()]
    if others:
        notes.append(
            f"{folder}: {len(others)} file(s) without an image's extension are left out: {listed(others)}"
        )
    return images


def check_output_outside(folder: Path, output_dir: str) -> None:
    """Raises `InputError` if the run would write below a folder whose images are read: its plots and masks
    would be the next run's data."""
    output = Path(os.path.realpath(output_dir))  # not Path.resolve, which raises for circular links
    if output.is_relative_to(os.path.realpath(folder)):
        raise InputError(
            f"--output_dir {output_dir}: lies in {folder}, whose images are read; name a folder outside of it"
        )


def class_folders(folder: Path, notes: list[str]) -> tuple[list[Path], list[str] | None]:
    """(images, class names). An image's class is the name of its subfolder; the class names are None if the
    images are in the folder itself. Raises `InputError` for an empty folder or class, and for images beside
    the class folders."""
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not subfolders:
        images = images_below(folder, notes)
        if not images:
            raise InputError(
                f"{folder}: holds no images; expected a folder for each class, with images in it"
            )
        return images, None
    if {path.name.lower() for path in subfolders} <= SPLITS:
        splits = ", ".join(path.name for path in subfolders)
        raise InputError(
            f"{folder}: holds splits ({splits}), not classes; give each by itself, such as "
            f"--train_file {subfolders[0]}"
        )
    beside = [
        path.name
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in image_extensions() and path.is_file()
    ]
    if beside:
        raise InputError(
            f"{folder}: holds images beside the folders of classes ({listed(beside)}); move them into a class"
        )
    images, names, empty = [], [], []
    for subfolder in subfolders:
        found = images_below(subfolder, notes)
        if not found:
            empty.append(
                f"{subfolder}: holds no images; remove the folder, or put the images of this class there"
            )
        images += found
        names += [subfolder.name] * len(found)
    if empty:
        raise InputError(*empty)
    return images, names
