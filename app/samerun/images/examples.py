"""Reads the images and classes of a split from folders, idx files, tables or data sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.parquet

from samerun.data.cache import cache_folder, content_hash
from samerun.data.splits import (
    LIMIT_ARGUMENTS,
    check_columns,
    check_consistent_labels,
    common_parent,
    expand_patterns,
    read_sources,
    read_split,
)
from samerun.data.tables import Table, check_ids, dataset_table, ids_of, read_table
from samerun.errors import InputError, in_short
from samerun.images.folders import check_output_outside, class_folders
from samerun.images.idx import images_file, is_idx, labels_file, read_idx
from samerun.images.sources import ArrayImages, EncodedImages, Images, JoinedImages, JoinedPlaces, Renumbered
from samerun.task import Mixture

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Examples:
    """The images of a split with their labels.

    `path`: the source. `classes`: the label of each row, such as a class name or the path of a mask; None
    without labels. `where`: row -> its name in messages. `declared`: all class names in order, if the source
    lists them. With several sources, `source` has for each row the number of the argument's value that it
    comes from; `sources`: a path for each such number.
    """

    path: str
    images: Images
    classes: Sequence[Any] | None
    where: Callable[[int], str]
    ids: Sequence[Any]
    declared: tuple[str, ...] = ()
    source: np.ndarray | None = None
    sources: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: np.ndarray) -> Examples:
        # As lists first: reading a table cell by cell is slow.
        classes, ids = (None if cells is None else list(cells) for cells in (self.classes, self.ids))
        classes, ids = classes and [classes[row] for row in rows], [ids[row] for row in rows]
        source, where = None if self.source is None else self.source[rows], Renumbered(self.where, rows)
        return replace(
            self, images=self.images.take(rows), classes=classes, ids=ids, where=where, source=source
        )

    def mixture(self, weights: Sequence[float] | None, notes: list[str]) -> Mixture | None:
        """The `Mixture` of the sources by --mixing_weights; None without weights."""
        return None if weights is None else Mixture.of(self.source, weights, self.sources, notes)


def read_examples(arguments: Any, split: str, notes: list[str]) -> Examples | None:
    """The images of "train", "validation" or "test", from --*_file or --dataset_name; None if neither is
    given.

    Raises `InputError` for problems of a source. `Images.inspect` checks the images themselves.
    """
    files = getattr(arguments, f"{split}_file")
    if files is None:
        return _from_dataset(arguments, split)
    paths = expand_patterns(f"--{split}_file", files)
    examples = read_each(
        f"--{split}_file", paths, partial(_from_path, arguments, split, above_folders(paths), notes)
    )
    limit = getattr(arguments, LIMIT_ARGUMENTS[split])
    if examples is None or limit is None or limit >= len(examples):
        return examples
    # The first images of a folder are all of one class: take evenly spaced ones.
    by_class = any(Path(path).is_dir() and images_file(Path(path), split) is None for path, _ in paths)
    return examples.take(
        np.linspace(0, len(examples) - 1, limit).astype(np.int64) if by_class else np.arange(limit)
    )


def read_each(
    argument: str, paths: Sequence[tuple[str, int]], read: Callable[[str], Examples | None]
) -> Examples | None:
    """`read_sources` for images. Raises `InputError` if only some sources have labels, too."""
    return read_sources(paths, read, partial(_joined, argument))


def _joined(argument: str, numbered: Sequence[tuple[Examples, int]]) -> Examples:
    parts, numbers = zip(*numbered, strict=True)
    check_consistent_labels(argument, [(examples.path, examples.classes is not None) for examples in parts])
    lengths = [len(examples) for examples in parts]
    part = np.repeat(np.arange(len(parts)), lengths)
    images = JoinedImages([examples.images for examples in parts], part)
    classes = None if parts[0].classes is None else [name for examples in parts for name in examples.classes]
    ids: list[Any] = []
    for examples in parts:  # numbered rows are numbered through
        ids += range(len(ids), len(ids) + len(examples)) if isinstance(examples.ids, range) else examples.ids
    return Examples(
        path=f"{parts[0].path} and {len(parts) - 1} more",
        images=images,
        classes=classes,
        where=JoinedPlaces([examples.where for examples in parts], part, images.row),
        ids=ids,
        declared=parts[0].declared if len({examples.declared for examples in parts}) == 1 else (),
        source=np.repeat(numbers, lengths),
        sources=tuple(parts[numbers.index(number)].path for number in dict.fromkeys(numbers)),
    )


def above_folders(paths: Sequence[tuple[str, int]]) -> str | None:
    """The folder above all source folders. Ids of images are paths from there, so that they are unique."""
    return common_parent([path for path, _ in paths if Path(path).is_dir()])


def _from_path(arguments: Any, split: str, base: str | None, notes: list[str], path: str) -> Examples:
    """`base`: the folder that ids are relative to, None for `path`."""
    source = Path(path)
    if not source.is_dir():
        return _from_idx(source) if is_idx(source) else from_table(arguments, split, source)
    images = images_file(source, split)
    if images is not None:
        return _from_idx(images)
    check_output_outside(source, arguments.output_dir)
    return _from_folder(source, base, notes)


def _from_idx(path: Path) -> Examples:
    pixels, labels = read_idx(path, 3), labels_file(path)
    classes = None
    if labels is not None:
        classes = read_idx(labels, 1).tolist()
        if len(classes) != len(pixels):
            raise InputError(
                f"{labels}: has {len(classes)} labels for the {len(pixels)} images of {path}; they "
                "do not belong together"
            )
    images = ArrayImages(str(path), pixels)
    return Examples(str(path), images, classes, images.name, range(len(pixels)))


def _from_folder(path: Path, base: str | None, notes: list[str]) -> Examples:
    files, classes = class_folders(path, notes)
    cells = [str(file.relative_to(path)) for file in files]
    images = EncodedImages(cells, path)
    return Examples(str(path), images, classes, images.name, named_from(base, path, cells))


def named_from(base: str | None, folder: Path, names: list[str]) -> list[str]:
    """File names in a folder, relative to `base` if that is given."""
    return names if base is None else [str(Path(os.path.relpath(folder, base), name)) for name in names]


def _columns(arguments: Any, split: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(required columns, optional columns) of a table. Raises `InputError` if images and labels share a
    column."""
    image, label, id_column = arguments.image_column, arguments.label_column, arguments.id_column
    if image == label:
        raise InputError(f"column {image!r} is used twice; images and labels need columns of their own")
    is_test = split == "test"
    required = (image, *([] if is_test else [label]), *([id_column] if is_test and id_column != "id" else []))
    return required, (label, *([id_column] if is_test else []))


def _from_dataset(arguments: Any, split: str) -> Examples | None:
    table = read_split(arguments, split, *_columns(arguments, split))
    return None if table is None else _of_table(arguments, split, table, Path())


def from_table(arguments: Any, split: str, path: Path) -> Examples:
    required, optional = _columns(arguments, split)
    if path.suffix.lower() == ".parquet" and _holds_images(path, arguments.image_column):
        rows = _parquet_rows(path, arguments.image_column)
        check_columns(rows, str(path), required)
        table = dataset_table(rows, str(path), required, optional)
    else:
        table = read_table(path, arguments.encoding, required, optional)
    return _of_table(arguments, split, table, path.parent)


def _of_table(arguments: Any, split: str, table: Table, folder: Path) -> Examples:
    """`folder`: the table's paths are relative to it."""
    label, id_column = arguments.label_column, arguments.id_column
    if split == "test":
        check_ids(table, id_column)
    images = EncodedImages(table.columns[arguments.image_column], folder, table.where)
    declared = tuple(table.classes.get(label, ()))
    return Examples(
        table.path, images, table.columns.get(label), table.where, ids_of(table, id_column), declared
    )


def _holds_images(path: Path, column: str) -> bool:
    """Whether a column of a parquet file holds images, not their paths. False for an unreadable file:
    `read_table` reports the error."""
    try:
        schema = pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError):
        return False
    kind = schema.field(column).type if column in schema.names else pyarrow.null()
    return (
        pyarrow.types.is_struct(kind) or pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)
    )


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
