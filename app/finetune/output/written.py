"""Which files of a folder runs have written, so that a run removes and replaces no others.

`.written.json` in the run's folder lists them. Rank 0 only.
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

from finetune.errors import InputError
from finetune.output.files import file_record, write_json

LIST = ".written.json"
PARTS = ("files", "patterns", "predictions")  # names in the folder, patterns of such names, hashes of contents
# What `replace_folder` and the copies for other machines leave in a crash.
UNFINISHED = re.compile(r"\.(step_\d+|best|kept_weights)\.(.*unfinished|old|of_rank_0_for_\d+)")
SHOWN = 3
_changing = threading.Lock()  # checkpoints are written by a thread


def add(folder: Path, *paths: Path) -> None:
    """Lists files below the run's `folder`; to be called before they are written. Begins the list, if there is none."""
    _change(folder, files=[path.relative_to(folder).as_posix() for path in paths])


def add_patterns(folder: Path, *patterns: str) -> None:
    """Lists the files that a library is about to make under names of its own, which match `patterns`."""
    _change(folder, patterns=patterns)


def owner(path: Path) -> Path | None:
    """The run's folder that a folder of it, or of its checkpoints, belongs to; None where there is no list."""
    return next((folder for folder in (path.parent, path.parent.parent) if (folder / LIST).is_file()), None)


def foreign(folder: Path, places: Iterable[str]) -> list[str]:
    """Files and links in these places of `folder` that no run is known to have written."""
    known = _read(folder)
    return [name for place in places for name in _files(folder, folder / place) if not _is_ours(name, known)]


def check_foreign(folder: Path, places: Iterable[str]) -> None:
    """Raises `InputError` naming foreign files."""
    found = foreign(folder, places)
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise InputError(
            f"--output_dir {folder}: {', '.join(found[:SHOWN])}{more} would be replaced, but no run is known to have written "
            "it; move it away, or name another folder"
        )


def remove(folder: Path, place: Path) -> None:
    """Removes what runs have written at or below `place` in the run's `folder`, unfinished folders, and folders left empty."""
    known = _read(folder)
    for name in [name for name in _files(folder, place) if _is_ours(name, known)]:
        (folder / name).unlink(missing_ok=True)
    if place.is_dir() and not place.is_symlink():
        for path in [*place.rglob("*"), place]:
            if UNFINISHED.fullmatch(path.name) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
        for path in sorted([*place.rglob("*"), place], reverse=True):
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):  # it is not empty
                    path.rmdir()
    _change(folder, without=place)


def remove_folder(path: Path) -> None:
    """Removes a best/ or a checkpoint but for files in it that no run has written."""
    folder = owner(path)
    if folder is None:
        shutil.rmtree(path)
    else:
        remove(folder, path)


def keep_foreign(path: Path, unfinished: Path) -> None:
    """Lists the files of `unfinished`, which is about to replace the folder `path`; copies to it what is not ours in `path`."""
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
    """Renames a checkpoint; what is not ours in it goes along."""
    folder = owner(old)
    if folder is not None:
        inside = set(_files(folder, old)) & _read(folder)["files"]
        add(folder, *(new / (folder / name).relative_to(old) for name in inside))
    os.rename(old, new)
    if folder is not None:
        _change(folder, without=old)


# Predictions, which may lie anywhere


def add_predictions(folder: Path, path: Path, content: Path) -> None:
    """Lists the predictions that `content` holds and `path` is about to."""
    inside = [path.name] if path.parent.resolve() == folder.resolve() else []
    _change(folder, files=inside, predictions=[file_record(content)["sha256"]])


def is_predictions(folder: Path, path: Path) -> bool:
    """Whether a regular file holds what a run of `folder` wrote as its predictions."""
    return file_record(path)["sha256"] in _read(folder)["predictions"]


# The list


def _is_ours(name: str, known: dict[str, set[str]]) -> bool:
    return name in known["files"] or any(fnmatch.fnmatchcase(name, pattern) for pattern in known["patterns"])


def _change(folder: Path, without: Path | None = None, **more: Iterable[str]) -> None:
    """Adds to the parts of the list; drops the files that are no longer at or below `without`."""
    with _changing:
        before = _read(folder)
        after = {key: before[key] | set(more.get(key, ())) for key in PARTS}
        if without is not None:
            gone = {name for name in after["files"] if not os.path.lexists(folder / name)}
            after["files"] -= {name for name in gone if (folder / name).is_relative_to(without)}
        if after != before or not (folder / LIST).is_file():
            write_json(folder / LIST, {key: sorted(after[key]) for key in PARTS})


def _read(folder: Path) -> dict[str, set[str]]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / LIST).read_text(encoding="utf-8"))
        return {key: set(found[key]) for key in PARTS}
    return {key: set() for key in PARTS}


def _files(folder: Path, place: Path) -> list[str]:
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        return [place.relative_to(folder).as_posix()]
    return [path.relative_to(folder).as_posix() for path in _walk(place)]


def _walk(place: Path) -> Iterator[Path]:
    """Files and links below a folder but for unfinished folders."""
    for parent, folders, files in os.walk(place):
        linked = [name for name in folders if (Path(parent) / name).is_symlink()]
        folders[:] = [name for name in folders if name not in linked and not UNFINISHED.fullmatch(name)]
        yield from (Path(parent) / name for name in sorted([*files, *linked]))
