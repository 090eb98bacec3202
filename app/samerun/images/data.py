"""The images of a run with their labels: from folders, MNIST's files, tables and data sets. They are decoded
when a batch needs them.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

from samerun.console import Phase
from samerun.data import splits
from samerun.data.cache import cache_folder, content_hash, content_key, file_state, get_or_create
from samerun.data.tables import Table, check_ids, dataset_table, ids_of, read_table
from samerun.errors import InputError, described, in_short, listed, raise_problems
from samerun.files import paths_in
from samerun.images.transforms import Encoded, Header, decode, decode_mask, read_header

if TYPE_CHECKING:
    import datasets

THREADS, GROUP = 8, 1024  # threads that read files; files per job of theirs
CACHE_VERSION, CACHE_FILE = "1", "images.parquet"
SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}  # names of folders
# File name prefixes of each split of MNIST and similar data sets (http://yann.lecun.com/exdb/mnist).
IDX_PREFIXES = {"train": ("train",), "validation": ("validation", "t10k", "test"), "test": ("t10k", "test")}
IDX_UINT8 = 8  # the type of their values


class Source(NamedTuple):
    """Images of one file or folder."""

    # A path, encoded bytes, {"bytes": ..., "path": ...} as in `datasets`, or an array of pixels each.
    cells: Sequence[Any]
    folder: Path  # paths are relative to it
    where: Callable[[int], str] | None  # number of a cell -> its place in messages; None: its path


class Inspection(NamedTuple):
    """The headers and content hashes of images, read without decoding them."""

    headers: list[Header]
    digests: list[str]

    @property
    def content(self) -> str:
        """A hash of all the images."""
        return content_key(self.digests)


@dataclass(frozen=True)
class Images:
    """Rows of images, or of masks. Row r is cell `cell[r]` of the source `source[r]`."""

    sources: tuple[Source, ...]
    source: np.ndarray
    cell: np.ndarray

    @classmethod
    def of(cls, cells: Sequence[Any], folder: Path, where: Callable[[int], str] | None = None) -> Images:
        return cls((Source(cells, folder, where),), np.zeros(len(cells), np.int64), np.arange(len(cells)))

    @classmethod
    def join(cls, parts: Sequence[Images]) -> Images:
        first = np.cumsum([0, *(len(part.sources) for part in parts)])
        return cls(
            tuple(source for part in parts for source in part.sources),
            np.concatenate([part.source + number for part, number in zip(parts, first, strict=False)]),
            np.concatenate([part.cell for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.cell)

    def take(self, rows: np.ndarray) -> Images:
        return replace(self, source=self.source[rows], cell=self.cell[rows])

    def __getitem__(self, row: int) -> Any:
        return self.sources[self.source[row]].cells[int(self.cell[row])]

    @property
    def are_arrays(self) -> bool:
        return all(isinstance(source.cells, np.ndarray) for source in self.sources)

    def where(self, row: int) -> str:
        """The place of a row in messages: a line of a table, or else the image itself."""
        source = self.sources[self.source[row]]
        return self.name(row) if source.where is None else source.where(int(self.cell[row]))

    def name(self, row: int) -> str:
        """The name of an image in messages: its file, or its row in a file."""
        cell = self[row]
        if isinstance(cell, str):
            return str(self.sources[self.source[row]].folder / cell)
        path = cell.get("path") if isinstance(cell, dict) else None
        return f"{self.where(row)} ({path})" if path else self.where(row)

    def load(self, row: int, mode: str) -> Image.Image:
        """Decodes an image in `mode`, "L" or "RGB". Raises `InputError` for a broken one."""
        cell = self[row]
        if isinstance(cell, np.ndarray):
            return Image.fromarray(cell).convert(mode)
        return decode(self.encoded(row), self.name(row), mode)

    def load_mask(self, row: int) -> Image.Image:
        """Decodes a mask of class numbers (`decode_mask`)."""
        return decode_mask(self.encoded(row), self.name(row))

    def encoded(self, row: int) -> Encoded:
        """The bytes or the path of an image. Raises `InputError` for another cell."""
        cell = self[row]
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
        return self.sources[self.source[row]].folder / cell

    def inspect(self) -> Inspection:
        """Reads all headers and hashes; caches those of files until one changes (`file_state`). Raises
        `InputError` listing files that are missing or no images."""
        if self.are_arrays:
            return Inspection(*map(list, zip(*map(self._inspect_one, range(len(self))), strict=True)))
        with ThreadPoolExecutor(THREADS) as pool:
            groups = (range(start, min(len(self), start + GROUP)) for start in range(0, len(self), GROUP))
            states = [state for group in pool.map(self._states, groups) for state in group]
        if None in states:
            return self._inspect()

        def write(folder: Path) -> None:
            headers, digests = self._inspect()
            columns = {name: [getattr(header, name) for header in headers] for name in Header._fields}
            parquet.write_table(pyarrow.table(columns | {"digest": digests}), folder / CACHE_FILE)

        key = content_key([CACHE_VERSION, *states])[:40]
        columns = parquet.read_table(get_or_create("images", key, write) / CACHE_FILE).to_pydict()
        headers = map(Header, columns["width"], columns["height"], columns["mode"])
        return Inspection(list(headers), columns["digest"])

    def _states(self, rows: range) -> list[str | None]:
        """`file_state` of each file, None for a cell that is no path."""
        cells = ((self[row], self.sources[self.source[row]].folder) for row in rows)
        return [file_state(folder / cell) if isinstance(cell, str) else None for cell, folder in cells]

    def _inspect(self) -> Inspection:
        results = map_rows(self._inspect_one, len(self), "looking at images", "images")
        return Inspection([header for header, _ in results], [digest for _, digest in results])

    def _inspect_one(self, row: int) -> tuple[Header, str]:
        cell = self[row]
        if isinstance(cell, np.ndarray):
            header = Header(cell.shape[1], cell.shape[0], "L" if cell.ndim == 2 else "RGB")
            return header, hashlib.sha256(cell).hexdigest()
        content, name = self.encoded(row), self.name(row)
        if isinstance(content, Path):
            try:
                content = content.read_bytes()
            except FileNotFoundError:
                raise InputError(f"{name}: this file does not exist") from None
            except OSError as error:
                raise InputError(f"{name}: cannot be read ({os.strerror(error.errno)})") from None
        return read_header(content, name), hashlib.sha256(content).hexdigest()


def map_rows(function: Callable[[int], Any], num_rows: int, phase: str, unit: str) -> list[Any]:
    """The results of a function for all rows, computed in threads with a progress bar. Raises `InputError`
    with the problems of all rows."""
    results, problems = [], []
    with ThreadPoolExecutor(THREADS) as pool, Phase(phase, unit, num_rows) as bar:
        for future in [pool.submit(function, row) for row in range(num_rows)]:
            try:
                results.append(future.result())
            except InputError as error:
                problems.append("; ".join(error.problems))
            bar.update()
    raise_problems(problems)
    return results


# Images with labels


@dataclass(frozen=True)
class Examples:
    """The images of a split with their labels."""

    path: str
    images: Images
    labels: Sequence[Any] | Images | None  # names of classes, or masks; None without labels
    ids: Sequence[Any]
    declared: tuple[str, ...] = ()  # all class names in order, if the source lists them
    # With several sources: each row's number of the argument's value, and a path for each number.
    source: np.ndarray | None = None
    sources: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    @property
    def labelled(self) -> bool:
        return self.labels is not None

    def labels_of(self, row: int) -> Sequence[str]:
        return () if self.labels is None or isinstance(self.labels, Images) else (self.labels[row],)

    def take(self, rows: np.ndarray) -> Examples:
        labels = self.labels
        if labels is not None:
            labels = labels.take(rows) if isinstance(labels, Images) else [labels[row] for row in rows]
        ids, source = [self.ids[row] for row in rows], None if self.source is None else self.source[rows]
        return replace(self, images=self.images.take(rows), labels=labels, ids=ids, source=source)


@dataclass(frozen=True)
class Targets:
    """The targets of a split."""

    values: np.ndarray | Images  # (rows,) int64 class numbers, or masks
    content: str  # a hash of them
    counts: list[dict[int, int]] | None = None  # for each mask, value -> number of pixels

    @property
    def totals(self) -> dict[int, int]:
        """Value -> number of pixels in all masks."""
        values = sorted({value for counts in self.counts for value in counts})
        return {value: sum(counts.get(value, 0) for counts in self.counts) for value in values}


def read_examples(arguments: Any, split: str, notes: list[str]) -> Examples | None:
    """The images of "train", "validation" or "test" with their classes; None if the arguments name no source.
    Raises `InputError` for problems of a source. `Images.inspect` checks the images themselves."""
    return read_paths(arguments, split, partial(_from_folder, arguments, split, notes))


def read_paths(
    arguments: Any, split: str, from_folder: Callable[..., Examples | None], masks: bool = False
) -> Examples | None:
    """The images of `splits.read_sources`; without any, of --dataset_name. `from_folder`: as its `read`, for
    folders. `masks`: the column of labels holds masks, not classes."""

    def read(path: str, is_own: bool, base: str | None) -> Examples | None:
        source = Path(path)
        if source.is_dir():
            return from_folder(path, is_own, base)
        is_idx = "-idx3-" in source.name or ".idx3-" in source.name
        return _from_idx(source) if is_idx else from_table(arguments, split, source, masks)

    examples = splits.read_sources(arguments, split, read, _joined)
    if examples is None:
        table = splits.read_split(arguments, split, *_columns(arguments, split))
        return None if table is None else _of_table(arguments, split, table, Path(), masks)
    limit = getattr(arguments, splits.LIMIT_ARGUMENTS[split])
    if limit is not None and not masks and any(map(os.path.isdir, examples.sources or [examples.path])):
        # The first images of a folder are all of one class: take evenly spaced ones.
        limit = min(limit, len(examples))
        return examples.take(np.linspace(0, len(examples) - 1, limit).astype(np.int64))
    return splits.limited(examples, arguments, split)


def _joined(argument: str, numbered: Sequence[tuple[Examples, int]]) -> Examples:
    """Raises `InputError` if only some sources have labels."""
    fields, parts = splits.joined_fields(argument, numbered), [part for part, _ in numbered]
    labels, ids = None, []
    if isinstance(parts[0].labels, Images):
        labels = Images.join([part.labels for part in parts])
    elif parts[0].labels is not None:
        labels = [label for part in parts for label in part.labels]
    for part in parts:  # numbered rows are numbered through
        ids += range(len(ids), len(ids) + len(part)) if isinstance(part.ids, range) else part.ids
    declared = parts[0].declared if len({part.declared for part in parts}) == 1 else ()
    images = Images.join([part.images for part in parts])
    return Examples(images=images, labels=labels, ids=ids, declared=declared, **fields)


def named_from(base: str | None, folder: Path, names: list[str]) -> list[str]:
    """File names in a folder, relative to `base`, the folder above all source folders: so they are unique.
    None: there is one source folder."""
    return names if base is None else [str(Path(os.path.relpath(folder, base), name)) for name in names]


def _from_folder(
    arguments: Any, split: str, notes: list[str], path: str, is_own: bool, base: str | None
) -> Examples | None:
    """The images of MNIST's files or of a folder per class, of the split's own argument alone."""
    if not is_own:
        return None
    folder = Path(path)
    idx = idx_images(folder, split)
    if idx is not None:
        return _from_idx(idx)
    check_output_outside(folder, arguments.output_dir)
    files, classes = class_folders(folder, notes)
    names = [str(file.relative_to(folder)) for file in files]
    return Examples(path, Images.of(names, folder), classes, named_from(base, folder, names))


# Folders


@cache
def image_extensions() -> frozenset[str]:
    """The extensions that Pillow can open, in lower case."""
    return frozenset(name for name, kind in Image.registered_extensions().items() if kind in Image.OPEN)


def images_below(folder: Path, notes: list[str]) -> list[Path]:
    """All images below a folder by extension, sorted by path. Skips hidden files and folders, and other files
    with a note."""
    files = sorted(_files_below(folder))
    if others := [path.name for path in files if path.suffix.lower() not in image_extensions()]:
        notes.append(f"{folder}: {len(others)} file(s) that Pillow does not read left out: {listed(others)}")
    return [path for path in files if path.suffix.lower() in image_extensions()]


def _files_below(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Follows links to folders, as ImageFolder of torchvision does, but to none of `above`: the real paths of
    the folders around this one."""
    place = os.path.realpath(folder)
    if place in above:
        return
    for path in paths_in(folder):
        if path.name.startswith("."):  # such as .ipynb_checkpoints
            continue
        if path.is_dir():
            yield from _files_below(path, above | {place})
        elif path.is_file():
            yield path


def check_output_outside(folder: Path, output_dir: str) -> None:
    """Raises `InputError` if the run would write below a folder whose images are read: its plots and masks
    would be the next run's data."""
    output = Path(os.path.realpath(output_dir))  # not Path.resolve, which raises for circular links
    if output.is_relative_to(os.path.realpath(folder)):
        raise InputError(
            f"--output_dir {output_dir}: lies in {folder}, whose images are read; name a folder outside of it"
        )


def class_folders(folder: Path, notes: list[str]) -> tuple[list[Path], list[str] | None]:
    """(images, class names), as for ImageFolder of torchvision and `datasets`: an image's class is the name
    of its subfolder. The class names are None if the images are in the folder itself. Raises `InputError` for
    an empty folder or class, and for images beside the class folders."""
    subfolders = [path for path in paths_in(folder) if path.is_dir() and not path.name.startswith(".")]
    if not subfolders:
        images = images_below(folder, notes)
        if not images:
            raise InputError(
                f"{folder}: holds no images; expected a folder for each class, with images in it"
            )
        return images, None
    if {path.name.lower() for path in subfolders} <= SPLITS:
        names = ", ".join(path.name for path in subfolders)
        raise InputError(
            f"{folder}: holds splits ({names}), not classes; give each by itself, such as "
            f"--train_file {subfolders[0]}"
        )
    files = [path for path in paths_in(folder) if path.is_file() and not path.name.startswith(".")]
    if beside := [path.name for path in files if path.suffix.lower() in image_extensions()]:
        raise InputError(
            f"{folder}: holds images beside the folders of classes ({listed(beside)}); move them into a class"
        )
    images, classes, problems = [], [], []
    for subfolder in subfolders:
        found = images_below(subfolder, notes)
        if not found:
            problems.append(
                f"{subfolder}: holds no images; remove the folder, or put the images of this class there"
            )
        images += found
        classes += [subfolder.name] * len(found)
    raise_problems(problems)
    return images, classes


# Tables and data sets


def _columns(arguments: Any, split: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(required columns, optional columns) of a table. Raises `InputError` if images and labels share a
    column."""
    image, label, id_column = arguments.image_column, arguments.label_column, arguments.id_column
    if image == label:
        raise InputError(f"column {image!r} is used twice; images and labels need columns of their own")
    if split != "test":
        return (image, label), ()
    return (image, *([id_column] if id_column != "id" else [])), (label, id_column)


def from_table(arguments: Any, split: str, path: Path, masks: bool) -> Examples:
    required, optional = _columns(arguments, split)
    if path.suffix.lower() == ".parquet" and _holds_images(path, arguments.image_column):
        rows = _parquet_rows(path, arguments.image_column)
        splits.check_columns(rows, str(path), required)
        table = dataset_table(rows, str(path), required, optional)
    else:
        table = read_table(path, arguments.encoding, required, optional)
    return _of_table(arguments, split, table, path.parent, masks)


def _of_table(arguments: Any, split: str, table: Table, folder: Path, masks: bool) -> Examples:
    """`folder`: the table's paths are relative to it."""
    if split == "test":
        check_ids(table, arguments.id_column)
    images = Images.of(table.columns[arguments.image_column], folder, table.where)
    labels = table.columns.get(arguments.label_column)
    if labels is not None:
        labels = Images.of(labels, folder, table.where) if masks else list(labels)
    declared, ids = table.classes.get(arguments.label_column, ()), ids_of(table, arguments.id_column)
    ids = ids if isinstance(ids, range) else list(ids)
    return Examples(table.path, images, labels, ids, tuple(declared))


def _holds_images(path: Path, column: str) -> bool:
    """Whether a column of a parquet file holds images, not their paths. False for an unreadable file:
    `read_table` reports the error."""
    try:
        schema = parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError):
        return False
    kind, types = schema.field(column).type if column in schema.names else pyarrow.null(), pyarrow.types
    return types.is_struct(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _parquet_rows(path: Path, column: str) -> datasets.Dataset:
    """The rows of a parquet file, memory-mapped from the cache of `datasets`, with undecoded images."""
    import datasets  # takes half a second, and only parquet files need it

    datasets.disable_progress_bars()  # they would also appear in log files
    try:
        # `datasets` knows a file by its time of modification alone.
        cache = str(cache_folder("parquet") / content_hash(path))
        rows = datasets.Dataset.from_parquet(str(path), cache_dir=cache)
        return rows.cast_column(column, datasets.Image(decode=False))
    except Exception as error:  # pyarrow's and those of `datasets`
        raise InputError(f"{path}: cannot be read ({in_short(error)})") from None


# MNIST's files: two zero bytes, type, number of dimensions, each as a big-endian int32, and the values


def idx_images(folder: Path, split: str) -> Path | None:
    """The images file of a split in a folder, plain or .gz; None if there is none."""
    names = (f"{prefix}-images[-.]idx3-ubyte*" for prefix in IDX_PREFIXES[split])
    files = (file for name in names for file in sorted(folder.glob(name)))
    return next((file for file in files if file.name.endswith(("ubyte", ".gz"))), None)


def _from_idx(path: Path) -> Examples:
    pixels, labels = read_idx(path, 3), None
    name = path.name.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
    file = next((file for file in map(path.with_name, (name, f"{name}.gz")) if file.is_file()), None)
    if file is not None:
        labels = read_idx(file, 1).tolist()
        if len(labels) != len(pixels):
            raise InputError(
                f"{file}: has {len(labels)} labels for the {len(pixels)} images of {path}; they "
                "do not belong together"
            )
    images = Images.of(pixels, Path(), f"{path} image {{}}".format)
    return Examples(str(path), images, labels, range(len(pixels)))


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array, uint8. Raises `InputError` for another type or number of dimensions, and for a truncated
    file."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({in_short(error)}); copy it again") from None
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes([0, 0, IDX_UINT8, dimensions]):
        raise InputError(
            f"{path}: is no idx file of bytes in {dimensions} dimension(s): it begins with {content[:4]!r}; "
            "give the files as downloaded"
        )
    shape = tuple(map(int, np.frombuffer(content[4:start], ">i4")))
    if len(content) != start + math.prod(shape):
        raise InputError(
            f"{path}: has {len(content)} bytes, but {' x '.join(map(str, shape))} values take "
            f"{start + math.prod(shape)}; copy it again"
        )
    if not math.prod(shape):
        raise InputError(f"{path}: no rows")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
