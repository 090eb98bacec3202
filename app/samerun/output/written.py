"""The list of the files that runs have written to a folder, `.written.json`. A run removes and replaces no
other files.

Rank 0 only. "Foreign" files are those that are not in the list.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from samerun.errors import InputError
from samerun.output.files import file_record, write_json

LIST = ".written.json"
PARTS = (
    "files",
    "patterns",
    "predictions",
)  # paths relative to the folder, patterns of such paths, hashes of contents
# Folders that a crash of `replace_folder`, or of a copy for other machines, leaves.
UNFINISHED = re.compile(r"\.(step_\d+|best|kept_weights)\.(.*unfinished|old|of_rank_0_for_\d+)")
SHOWN = 3
_lock = threading.Lock()  # checkpoints are written by a thread


def add(folder: Path, *paths: Path) -> None:
    """Lists files below the run's `folder`. Call it before they are written. Creates the list if there is
    none."""
    _change(folder, files=[path.relative_to(folder).as_posix() for path in paths])


def add_patterns(folder: Path, *patterns: str) -> None:
    """Lists file names that a library chooses itself, by `patterns` that match them."""
    _change(folder, patterns=patterns)


def owner(path: Path) -> Path | None:
    """The run's folder that holds `path`, such as best/ or checkpoints/step_5; None if no parent has a
    list."""
    return next((folder for folder in (path.parent, path.parent.parent) if (folder / LIST).is_file()), None)


def foreign(folder: Path, places: Iterable[str]) -> list[str]:
    """The foreign files and links at or below these paths, relative to `folder`."""
    listed = _read(folder)
    return [
        name for place in places for name in _files(folder, folder / place) if not _is_listed(name, listed)
    ]


def check_foreign(folder: Path, places: Iterable[str]) -> None:
    """Raises `InputError` naming foreign files."""
    names = foreign(folder, places)
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise InputError(
            f"--output_dir {folder}: {', '.join(names[:SHOWN])}{more} would be replaced, but no run "
            "is known to have written "
            "it; move it away, or name another folder"
        )


def remove(folder: Path, place: Path) -> None:
    """Removes listed files at or below `place` in the run's `folder`, unfinished folders, and then empty
    folders."""
    listed = _read(folder)
    for name in [name for name in _files(folder, place) if _is_listed(name, listed)]:
        (folder / name).unlink(missing_ok=True)
    if place.is_dir() and not place.is_symlink():
        for path in [*place.rglob("*"), place]:
            if UNFINISHED.fullmatch(path.name) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
        for path in sorted([*place.rglob("*"), place], reverse=True):
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):  # not empty
                    path.rmdir()
    _change(folder, without=place)


def remove_folder(path: Path) -> None:
    """Removes a best/ or a checkpoint, except for foreign files in it."""
    folder = owner(path)
    if folder is None:
        shutil.rmtree(path)
    else:
        remove(folder, path)


def keep_foreign(path: Path, unfinished: Path) -> None:
    """Prepares `unfinished` to replace the folder `path`: lists its files, and copies foreign files of `path`
    to it."""
    folder = owner(path)
    if folder is None:
        return
    for name in foreign(folder, [path.relative_to(folder).as_posix()]):
        target = unfinished / (folder / name).relative_to(path)
        if not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / name, target, follow_symlinks=False)
    new = [file for file in _walk(unfinished) if not os.path.lexists(path / file.relative_to(unfinished))]
    add(folder, *(path / file.relative_to(unfinished) for file in new))


def rename(old: Path, new: Path) -> None:
    """Renames a checkpoint and its files in the list."""
    folder = owner(old)
    if folder is not None:
        listed = set(_files(folder, old)) & _read(folder)["files"]
        add(folder, *(new / (folder / name).relative_to(old) for name in listed))
    os.rename(old, new)
    if folder is not None:
        _change(folder, without=old)


# Predictions, which may be outside of the folder


def add_predictions(folder: Path, path: Path, content: Path) -> None:
    """Lists the hash of predictions. `content`: the temporary file that holds them; `path`: where it will be
    moved to."""
    inside = [path.name] if path.parent.resolve() == folder.resolve() else []
    _change(folder, files=inside, predictions=[file_record(content)["sha256"]])


def is_predictions(folder: Path, path: Path) -> bool:
    """Whether the content of a regular file is listed as predictions of a run in `folder`."""
    return file_record(path)["sha256"] in _read(folder)["predictions"]


# The list


def _is_listed(name: str, listed: dict[str, set[str]]) -> bool:
    return name in listed["files"] or any(
        fnmatch.fnmatchcase(name, pattern) for pattern in listed["patterns"]
    )


def _change(folder: Path, without: Path | None = None, **added: Iterable[str]) -> None:
    """Adds entries to the list; drops the removed files at or below `without`."""
    with _lock:
        before = _read(folder)
        after = {key: before[key] | set(added.get(key, ())) for key in PARTS}
        if without is not None:
            removed = {name for name in after["files"] if not os.path.lexists(folder / name)}
            after["files"] -= {name for name in removed if (folder / name).is_relative_to(without)}
        if after != before or not (folder / LIST).is_file():
            write_json(folder / LIST, {key: sorted(after[key]) for key in PARTS})


def _read(folder: Path) -> dict[str, set[str]]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((folder / LIST).read_text(encoding="utf-8"))
        return {key: set(content[key]) for key in PARTS}
    return {key: set() for key in PARTS}


def _files(folder: Path, place: Path) -> list[str]:
    """Files and links at or below `place`, relative to `folder`."""
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        return [place.relative_to(folder).as_posix()]
    return [path.relative_to(folder).as_posix() for path in _walk(place)]


def _walk(place: Path) -> Iterator[Path]:
    """Files and links below a folder, without those in unfinished folders."""
    for parent, folders, files in os.walk(place):
        linked = [name for name in folders if (Path(parent) / name).is_symlink()]
        folders[:] = [name for name in folders if name not in linked and not UNFINISHED.fullmatch(name)]
        yield from (Path(parent) / name for name in sorted([*files, *linked]))
