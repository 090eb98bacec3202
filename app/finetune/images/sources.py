"""Where pictures are: an array in memory, files, or cells of a table. Only what a batch needs is decoded."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

from finetune.errors import InputError
from finetune.images.decoding import Encoded, Header, decode, decode_mask, read_header
from finetune.output.progress import Phase
from finetune.reading.cache import get_or_create
from finetune.reading.columns import SHOWN, more
from finetune.reading.fingerprint import file_state, fingerprint
from finetune.reading.problems import described

THREADS, GROUP = 8, 1024  # that look at files, as they wait for the disk; files in a piece of their work
FORM, FOUND = "1", "pictures.parquet"  # of what is kept


@dataclass(frozen=True)
class Inspected:
    """What is known of pictures before any is decoded. `digests`: a hash of each one's content."""

    headers: list[Header]
    digests: list[str]

    @property
    def content(self) -> str:
        """A hash of all the pictures."""
        return fingerprint(self.digests)

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """The different (height, width)."""
        return {(header.height, header.width) for header in self.headers}


class Images(ABC):
    """Pictures, or masks, by number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, row: int) -> str:
        """What messages call a picture: its file, or its row in one."""

    @abstractmethod
    def load(self, row: int, mode: str) -> Image.Image:
        """A picture in `mode`, "L" or "RGB". Raises `InputError` for one that is broken."""

    @abstractmethod
    def load_mask(self, row: int) -> Image.Image:
        """A picture of class numbers (`decoding.decode_mask`)."""

    @abstractmethod
    def take(self, rows: np.ndarray) -> Images:
        """Some of them, in this order."""

    @abstractmethod
    def inspect(self) -> Inspected:
        """Headers and hashes of all. Raises `InputError` with all that are missing or no pictures."""

    @abstractmethod
    def beside(self, cells: Sequence[Any], where: Callable[[int], str]) -> Images:
        """Other pictures that the same source has for these rows, such as masks. Raises `InputError` if it can have none."""


@dataclass(frozen=True)
class ArrayImages(Images):
    """`pixels`: (n, height, width) or (n, height, width, 3) uint8."""

    path: str
    pixels: np.ndarray

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, row: int) -> str:
        return f"{self.path} picture {row}"

    def load(self, row: int, mode: str) -> Image.Image:
        return Image.fromarray(self.pixels[row]).convert(mode)

    def load_mask(self, row: int) -> Image.Image:
        return Image.fromarray(self.pixels[row])

    def take(self, rows: np.ndarray) -> ArrayImages:
        return ArrayImages(self.path, self.pixels[rows])

    def inspect(self) -> Inspected:
        height, width = self.pixels.shape[1:3]
        header = Header(width, height, "L" if self.pixels.ndim == 3 else "RGB")
        return Inspected([header] * len(self), [hashlib.sha256(picture).hexdigest() for picture in self.pixels])

    def beside(self, cells: Sequence[Any], where: Callable[[int], str]) -> Images:
        raise InputError(f"{self.path}: holds pictures with class numbers, not with masks; give a folder or a table of both")


@dataclass(frozen=True)
class EncodedImages(Images):
    """`cells`: a path (relative to `folder`), or {"bytes": ..., "path": ...} as `datasets` stores pictures. `where`: what
    messages call a row that has no file."""

    cells: Sequence[Any]
    folder: Path
    where: Callable[[int], str] = str

    def __len__(self) -> int:
        return len(self.cells)

    def name(self, row: int) -> str:
        cell = self.cells[row]
        if isinstance(cell, str):
            return str(self.folder / cell)
        return f"{self.where(row)} ({cell['path']})" if isinstance(cell, dict) and cell.get("path") else self.where(row)

    def load(self, row: int, mode: str) -> Image.Image:
        return decode(self.encoded(row), self.name(row), mode)

    def load_mask(self, row: int) -> Image.Image:
        return decode_mask(self.encoded(row), self.name(row))

    def encoded(self, row: int) -> Encoded:
        """Raises `InputError` for a cell that is no picture."""
        cell = self.cells[row]
        if isinstance(cell, bytes):
            return cell
        if isinstance(cell, dict):
            if isinstance(cell.get("bytes"), bytes):
                return cell["bytes"]
            cell = cell.get("path")
        if not isinstance(cell, str) or not cell:
            raise InputError(f"{self.where(row)}: the picture is {described(cell)}, expected the path of a file")
        return self.folder / cell

    def take(self, rows: np.ndarray) -> EncodedImages:
        cells = self.cells.take(rows) if hasattr(self.cells, "take") else [self.cells[row] for row in rows]
        return EncodedImages(cells, self.folder, Renumbered(self.where, rows))

    def inspect(self) -> Inspected:
        """What is found in files is kept until the size or the time of change of one differs, so that a start does not read
        them all again."""
        with ThreadPoolExecutor(THREADS) as pool:
            groups = (range(start, min(len(self), start + GROUP)) for start in range(0, len(self), GROUP))
            states = [state for group in pool.map(self._states, groups) for state in group]
        if None in states:
            return self._inspect()
        place = get_or_create(
            "pictures", fingerprint([FORM, *states])[:40], lambda folder: _store(self._inspect(), folder / FOUND)
        )
        return _stored(place / FOUND)

    def beside(self, cells: Sequence[Any], where: Callable[[int], str]) -> EncodedImages:
        return EncodedImages(cells, self.folder, where)

    def _states(self, rows: range) -> list[str | None]:
        """`file_state` of pictures, None of one that is no file."""
        return [file_state(self.folder / cell) if isinstance(cell := self.cells[row], str) else None for row in rows]

    def _inspect(self) -> Inspected:
        found, problems = [], []
        # Threads, since the disk is what takes time; a file is read whole for its hash, and its header from memory.
        with ThreadPoolExecutor(THREADS) as pool, Phase("looking at pictures", "pictures", len(self)) as bar:
            for outcome in pool.map(self._inspect_one, range(len(self))):
                (problems if isinstance(outcome, str) else found).append(outcome)
                bar.update()
        if problems:
            raise InputError(*problems[:SHOWN], *more(len(problems)))
        return Inspected([header for header, _ in found], [digest for _, digest in found])

    def _inspect_one(self, row: int) -> tuple[Header, str] | str:
        """(header, hash), or what is wrong with the picture."""
        try:
            encoded, name = self.encoded(row), self.name(row)
            content = encoded if isinstance(encoded, bytes) else _content(encoded, name)
            return read_header(content, name), hashlib.sha256(content).hexdigest()
        except InputError as error:
            return "; ".join(error.problems)


@dataclass(frozen=True)
class JoinedImages(Images):
    """Pictures of several sources. `part`: (rows,) the number of each row's source, whose rows keep their order."""

    parts: Sequence[Images]
    part: np.ndarray

    def __len__(self) -> int:
        return len(self.part)

    @cached_property
    def row(self) -> np.ndarray:
        """(rows,) the number of each row in its source."""
        return rows_in_parts(self.part)

    def name(self, row: int) -> str:
        return self.parts[self.part[row]].name(int(self.row[row]))

    def load(self, row: int, mode: str) -> Image.Image:
        return self.parts[self.part[row]].load(int(self.row[row]), mode)

    def load_mask(self, row: int) -> Image.Image:
        return self.parts[self.part[row]].load_mask(int(self.row[row]))

    def take(self, rows: np.ndarray) -> JoinedImages:
        part, row = self.part[rows], self.row[rows]
        return JoinedImages([images.take(row[part == number]) for number, images in enumerate(self.parts)], part)

    def inspect(self) -> Inspected:
        inspected, problems = [], []
        for images in self.parts:
            try:
                inspected.append(images.inspect())
            except InputError as error:
                problems += error.problems
        if problems:
            raise InputError(*problems[:SHOWN], *more(len(problems)))
        places = list(zip(self.part.tolist(), self.row.tolist(), strict=True))
        headers = [inspected[part].headers[row] for part, row in places]
        return Inspected(headers, [inspected[part].digests[row] for part, row in places])

    def beside(self, cells: Sequence[Any], where: Callable[[int], str]) -> JoinedImages:
        cells, others = list(cells), []
        for number, images in enumerate(self.parts):
            rows = np.flatnonzero(self.part == number)
            others.append(images.beside([cells[row] for row in rows], Renumbered(where, rows)))
        return JoinedImages(others, self.part)


def rows_in_parts(part: np.ndarray) -> np.ndarray:
    """(rows,) int64: how many earlier rows have the same number in `part`, (rows,)."""
    found = np.empty(len(part), dtype=np.int64)
    for number in np.unique(part):
        found[part == number] = np.arange(np.count_nonzero(part == number))
    return found


def _store(found: Inspected, path: Path) -> None:
    widths, heights, modes = zip(*found.headers, strict=True) if found.headers else ((), (), ())
    columns = {"width": widths, "height": heights, "mode": modes, "digest": found.digests}
    parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), path)


def _stored(path: Path) -> Inspected:
    columns = parquet.read_table(path).to_pydict()
    return Inspected(list(map(Header, columns["width"], columns["height"], columns["mode"])), columns["digest"])


@dataclass(frozen=True)
class JoinedPlaces:
    """`where` of the rows of several sources; see `JoinedImages`."""

    wheres: Sequence[Callable[[int], str]]
    part: np.ndarray
    row: np.ndarray

    def __call__(self, row: int) -> str:
        return self.wheres[self.part[row]](int(self.row[row]))


@dataclass(frozen=True)
class Renumbered:
    """`where` of some rows of what was taken from."""

    where: Callable[[int], str]
    rows: np.ndarray

    def __call__(self, row: int) -> str:
        return self.where(int(self.rows[row]))


def _content(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = (
            "this file does not exist"
            if isinstance(error, FileNotFoundError)
            else f"cannot be read ({os.strerror(error.errno)})"
        )
        raise InputError(f"{name}: {reason}") from None
