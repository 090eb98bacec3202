"""Sources of images: an array in memory, files, cells of a table. Images are decoded lazily."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

from samerun.data.cache import file_state, fingerprint, get_or_create
from samerun.errors import InputError, collecting, described, raise_problems
from samerun.images.decoding import Encoded, Header, decode, decode_mask, read_header
from samerun.output.progress import Phase

THREADS, GROUP = 8, 1024  # threads that read files; files per job of theirs
CACHE_VERSION, CACHE_FILE = "1", "images.parquet"


@dataclass(frozen=True)
class Inspection:
    """The headers and content hashes of images, read without decoding them."""

    headers: list[Header]
    digests: list[str]

    @property
    def content(self) -> str:
        """A hash of all the images."""
        return fingerprint(self.digests)

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """The distinct (height, width)."""
        return {(header.height, header.width) for header in self.headers}


class Images(ABC):
    """A sequence of images or masks. A row is the number of one."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, row: int) -> str:
        """The name of an image in messages: its file, or its row in a file."""

    @abstractmethod
    def load(self, row: int, mode: str) -> Image.Image:
        """Decodes an image in `mode`, "L" or "RGB". Raises `InputError` for a broken one."""

    @abstractmethod
    def load_mask(self, row: int) -> Image.Image:
        """Decodes a mask of class numbers (`decoding.decode_mask`)."""

    @abstractmethod
    def take(self, rows: np.ndarray) -> Images:
        """The images of these rows, in this order."""

    @abstractmethod
    def inspect(self) -> Inspection:
        """Reads all headers and hashes. Raises `InputError` listing files that are missing or no images."""

    @abstractmethod
    def beside(self, cells: Sequence[Any], where: Callable[[int], str]) -> Images:
        """The masks of these images, from another column of the same source. Raises `InputError` if it has no
        columns."""


@dataclass(frozen=True)
class ArrayImages(Images):
    """`pixels`: (n, height, width) or (n, height, width, 3) uint8."""

    path: str
    pixels: np.ndarray

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, row: int) -> str:
        return f"{self.path} image {row}"

    def load(self, row: int, mode: str) -> Image.Image:
        return Image.fromarray(self.pixels[row]).convert(mode)

    def load_mask(self, row: int) -> Image.Image:
        return Image.fromarray(self.pixels[row])

    def take(self, rows: np.ndarray) -> ArrayImages:
        return ArrayImages(self.path, self.pixels[rows])

    def inspect(self) -> Inspection:
        height, width = self.pixels.shape[1:3]
        header = Header(width, height, "L" if self.pixels.ndim == 3 else "RGB")
        return Inspection([header] * len(self), [hashlib.sha256(image).hexdigest() for image in self.pixels])

    def beside(self, cells: Sequence[Any], where: Callable[[int], str]) -> Images:
        raise InputError(
            f"{self.path}: has class numbers in place of masks; give a folder or a table of images and masks"
        )


@dataclass(frozen=True)
class EncodedImages(Images):
    """`cells`: paths relative to `folder`, encoded bytes, or {"bytes": ..., "path": ...} as in `datasets`.
    `where`: row -> its name in messages, if it has no file."""

    cells: Sequence[Any]
    folder: Path
    where: Callable[[int], str] = str

    def __len__(self) -> int:
        return len(self.cells)

    def name(self, row: int) -> str:
        cell = self.cells[row]
        if isinstance(cell, str):
            return str(self.folder / cell)
        return (
            f"{self.where(row)} ({cell['path']})"
            if isinstance(cell, dict) and cell.get("path")
            else self.where(row)
        )

    def load(self, row: int, mode: str) -> Image.Image:
        return decode(self.encoded(row), self.name(row), mode)

    def load_mask(self, row: int) -> Image.Image:
        return decode_mask(self.encoded(row), self.name(row))

    def encoded(self, row: int) -> Encoded:
        """The bytes or the path of an image. Raises `InputError` for another cell."""
        cell = self.cells[row]
        if isinstance(cell, bytes):
            return cell
        if isinstance(cell, dict):
            if isinstance(cell.get("bytes"), bytes):
                return cell["bytes"]
            cell = cell.get("path")
        if not isinstance(cell, str) or not cell:
            raise InputError(
                f"{self.where(row)}: the image is {described(cell)}, expected the path of a file"
            )
        return self.folder / cell

    def take(self, rows: np.ndarray) -> EncodedImages:
        cells = self.cells.take(rows) if hasattr(self.cells, "take") else [self.cells[row] for row in rows]
        return EncodedImages(cells, self.folder, Renumbered(self.where, rows))

    def inspect(self) -> Inspection:
        """Cached for files, until one changes (`file_state`)."""
        with ThreadPoolExecutor(THREADS) as pool:
            groups = (range(start, min(len(self), start + GROUP)) for start in range(0, len(self), GROUP))
            states = [state for group in pool.map(self._states, groups) for state in group]
        if None in states:
            return self._inspect()
        key = fingerprint([CACHE_VERSION, *states])[:40]
        folder = get_or_create(
            "images", key, lambda folder: _write_cache(self._inspect(), folder / CACHE_FILE)
        )
        return _read_cache(folder / CACHE_FILE)

    def beside(self, cells: Sequence[Any], where: Callable[[int], str]) -> EncodedImages:
        return EncodedImages(cells, self.folder, where)

    def _states(self, rows: range) -> list[str | None]:
        """`file_state` of each file, None for a cell that is no path."""
        return [
            file_state(self.folder / cell) if isinstance(cell := self.cells[row], str) else None
            for row in rows
        ]

    def _inspect(self) -> Inspection:
        results = map_rows(self._inspect_one, len(self), "looking at images", "images")
        return Inspection([header for header, _ in results], [digest for _, digest in results])

    def _inspect_one(self, row: int) -> tuple[Header, str]:
        encoded, name = self.encoded(row), self.name(row)
        content = encoded if isinstance(encoded, bytes) else _read_bytes(encoded, name)
        return read_header(content, name), hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class JoinedImages(Images):
    """Images of several sources. `part`: (rows,) the number of each row's source. Rows of a source keep their
    order."""

    parts: Sequence[Images]
    part: np.ndarray

    def __len__(self) -> int:
        return len(self.part)

    @cached_property
    def row(self) -> np.ndarray:
        """(rows,) each row's number within its source."""
        return rows_in_parts(self.part)

    def name(self, row: int) -> str:
        return self.parts[self.part[row]].name(int(self.row[row]))

    def load(self, row: int, mode: str) -> Image.Image:
        return self.parts[self.part[row]].load(int(self.row[row]), mode)

    def load_mask(self, row: int) -> Image.Image:
        return self.parts[self.part[row]].load_mask(int(self.row[row]))

    def take(self, rows: np.ndarray) -> JoinedImages:
        part, row = self.part[rows], self.row[rows]
        return JoinedImages(
            [images.take(row[part == number]) for number, images in enumerate(self.parts)], part
        )

    def inspect(self) -> Inspection:
        inspected, problems = [], []
        for images in self.parts:
            with collecting(problems):
                inspected.append(images.inspect())
        raise_problems(problems)
        pairs = list(zip(self.part.tolist(), self.row.tolist(), strict=True))
        headers = [inspected[part].headers[row] for part, row in pairs]
        return Inspection(headers, [inspected[part].digests[row] for part, row in pairs])

    def beside(self, cells: Sequence[Any], where: Callable[[int], str]) -> JoinedImages:
        cells, others = list(cells), []
        for number, images in enumerate(self.parts):
            rows = np.flatnonzero(self.part == number)
            others.append(images.beside([cells[row] for row in rows], Renumbered(where, rows)))
        return JoinedImages(others, self.part)


def map_rows(function: Callable[[int], Any], num_rows: int, phase: str, unit: str) -> list[Any]:
    """The results of a function for all rows, computed in threads with a progress bar. Raises `InputError`
    with the problems of all rows."""
    results, errors = [], []
    with ThreadPoolExecutor(THREADS) as pool, Phase(phase, unit, num_rows) as bar:
        for result in pool.map(partial(_result_or_error, function), range(num_rows)):
            (errors if isinstance(result, InputError) else results).append(result)
            bar.update()
    raise_problems(["; ".join(error.problems) for error in errors])
    return results


def _result_or_error(function: Callable[[int], Any], row: int) -> Any:
    try:
        return function(row)
    except InputError as error:
        return error


def rows_in_parts(part: np.ndarray) -> np.ndarray:
    """(rows,) int64: each row's number within its part. `part`: (rows,) the number of the part."""
    rows = np.empty(len(part), dtype=np.int64)
    for number in np.unique(part):
        rows[part == number] = np.arange(np.count_nonzero(part == number))
    return rows


def _write_cache(inspection: Inspection, path: Path) -> None:
    widths, heights, modes = zip(*inspection.headers, strict=True) if inspection.headers else ((), (), ())
    columns = {"width": widths, "height": heights, "mode": modes, "digest": inspection.digests}
    parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), path)


def _read_cache(path: Path) -> Inspection:
    columns = parquet.read_table(path).to_pydict()
    return Inspection(
        list(map(Header, columns["width"], columns["height"], columns["mode"])), columns["digest"]
    )


@dataclass(frozen=True)
class JoinedPlaces:
    """`where` for rows of several sources; see `JoinedImages`."""

    wheres: Sequence[Callable[[int], str]]
    part: np.ndarray
    row: np.ndarray

    def __call__(self, row: int) -> str:
        return self.wheres[self.part[row]](int(self.row[row]))


@dataclass(frozen=True)
class Renumbered:
    """`where` for a selection of rows."""

    where: Callable[[int], str]
    rows: np.ndarray

    def __call__(self, row: int) -> str:
        return self.where(int(self.rows[row]))


def _read_bytes(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = (
            "this file does not exist"
            if isinstance(error, FileNotFoundError)
            else f"cannot be read ({os.strerror(error.errno)})"
        )
        raise InputError(f"{name}: {reason}") from None
