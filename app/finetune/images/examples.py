"""The pictures of a split with the classes that stand beside them, from any of the forms that users have."""

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

from finetune.errors import InputError
from finetune.images.folders import class_folders
from finetune.images.idx import images_file, is_idx, labels_file, read_idx
from finetune.images.sources import ArrayImages, EncodedImages, Images, JoinedImages, JoinedPlaces, Renumbered
from finetune.reading.columns import SHOWN, check_ids, ids_of, more
from finetune.reading.splits import check_columns, check_consistent_labels, common_parent, expand_patterns, read_split, table_of
from finetune.reading.tables import Table, read_table
from finetune.task import Mixture

if TYPE_CHECKING:
    import datasets

LIMITS = {"train": "max_train_samples", "validation": "max_eval_samples", "test": "max_predict_samples"}


@dataclass(frozen=True)
class Examples:
    """`classes`: what the source has as each row's class, None where it has none. `where`: what messages call a row.
    `declared`: the names of all classes, in their order, where the source gives them. `source`: (rows,) of several sources, the
    number of the argument's value that each row is of; `sources`: the first source of each, in words."""

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
        # Lists first: one cell of a table at a time is slow.
        classes, ids = (None if cells is None else list(cells) for cells in (self.classes, self.ids))
        classes, ids = classes and [classes[row] for row in rows], [ids[row] for row in rows]
        source, where = None if self.source is None else self.source[rows], Renumbered(self.where, rows)
        return replace(self, images=self.images.take(rows), classes=classes, ids=ids, where=where, source=source)

    def mixture(self, weights: Sequence[float] | None, notes: list[str]) -> Mixture | None:
        """How --mixing_weights mixes the sources (`Mixture.of`); None without weights."""
        return None if weights is None else Mixture.of(self.source, weights, self.sources, notes)


def read_examples(arguments: Any, split: str, notes: list[str]) -> Examples | None:
    """The pictures of "train", "validation" or "test" from `--*_file`, folders and files, or from --dataset_name; None when
    neither is given. `arguments`: those of ImageArguments.

    Raises `InputError` for what is wrong with a source; the pictures themselves are looked at by `Images.inspect`.
    """
    named = getattr(arguments, f"{split}_file")
    if named is None:
        return _from_dataset(arguments, split)
    paths = expand_patterns(f"--{split}_file", named)
    found = read_each(f"--{split}_file", paths, partial(_from_path, arguments, split, above_folders(paths), notes))
    most = getattr(arguments, LIMITS[split])
    if found is None or most is None or most >= len(found):
        return found
    # A folder's first pictures are all of one class.
    by_class = any(Path(path).is_dir() and images_file(Path(path), split) is None for path, _ in paths)
    return found.take(np.linspace(0, len(found) - 1, most).astype(np.int64) if by_class else np.arange(most))


def read_each(argument: str, paths: Sequence[tuple[str, int]], read: Callable[[str], Examples | None]) -> Examples | None:
    """What `read` finds in all sources of `expand_patterns`, one after the other; None if it finds none. Raises `InputError`
    with what is wrong in each, and where only some have labels."""
    found, problems = [], []
    for path, number in paths:
        try:
            found.append((read(path), number))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems[:SHOWN], *more(len(problems)))
    found = [(examples, number) for examples, number in found if examples is not None]
    return _joined(argument, found) if len(found) > 1 else next((examples for examples, _ in found), None)


def _joined(argument: str, found: Sequence[tuple[Examples, int]]) -> Examples:
    parts, numbers = zip(*found, strict=True)
    check_consistent_labels(argument, [(each.path, each.classes is not None) for each in parts])
    lengths = [len(each) for each in parts]
    part = np.repeat(np.arange(len(parts)), lengths)
    images = JoinedImages([each.images for each in parts], part)
    ids, classes = [], None if parts[0].classes is None else [name for each in parts for name in each.classes]
    for each in parts:  # numbered rows go on where the last source ended
        ids += range(len(ids), len(ids) + len(each)) if isinstance(each.ids, range) else each.ids
    return Examples(
        path=f"{parts[0].path} and {len(parts) - 1} more",
        images=images,
        classes=classes,
        where=JoinedPlaces([each.where for each in parts], part, images.row),
        ids=ids,
        declared=parts[0].declared if len({each.declared for each in parts}) == 1 else (),
        source=np.repeat(numbers, lengths),
        sources=tuple(parts[numbers.index(number)].path for number in dict.fromkeys(numbers)),
    )


def above_folders(paths: Sequence[tuple[str, int]]) -> str | None:
    """`above` of the folders among several sources: their pictures are named from there, so that no two have one name."""
    return common_parent([path for path, _ in paths if Path(path).is_dir()])


def _from_path(arguments: Any, split: str, base: str | None, notes: list[str], path: str) -> Examples:
    """`base`: the folder from which pictures are named, None for `path`."""
    place = Path(path)
    if not place.is_dir():
        return _from_idx(place) if is_idx(place) else from_table(arguments, split, place)
    images = images_file(place, split)
    return _from_folder(place, base, notes) if images is None else _from_idx(images)


def _from_idx(path: Path) -> Examples:
    pixels, labels = read_idx(path, 3), labels_file(path)
    classes = None
    if labels is not None:
        numbers = read_idx(labels, 1)
        if len(numbers) != len(pixels):
            raise InputError(
                f"{labels}: has {len(numbers)} labels for the {len(pixels)} pictures of {path}; they do not belong together"
            )
        classes = numbers.tolist()
    images = ArrayImages(str(path), pixels)
    return Examples(str(path), images, classes, images.name, range(len(pixels)))


def _from_folder(path: Path, base: str | None, notes: list[str]) -> Examples:
    pictures, classes = class_folders(path, notes)
    cells = [str(picture.relative_to(path)) for picture in pictures]
    images = EncodedImages(cells, path)
    return Examples(str(path), images, classes, images.name, named_from(base, path, cells))


def named_from(base: str | None, folder: Path, names: list[str]) -> list[str]:
    """Names of files in a folder as they are there or, with `base`, from that folder above it."""
    return names if base is None else [str(Path(os.path.relpath(folder, base), name)) for name in names]


def _columns(arguments: Any, split: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(required, optional) columns of a table. Raises `InputError` for one that is used twice."""
    image, label, id_column = arguments.image_column, arguments.label_column, arguments.id_column
    if image == label:
        raise InputError(f"column {image!r} is used twice; pictures and labels need columns of their own")
    is_test = split == "test"
    required = (image, *([] if is_test else [label]), *([id_column] if is_test and id_column != "id" else []))
    return required, (label, *([id_column] if is_test else []))


def _from_dataset(arguments: Any, split: str) -> Examples | None:
    table = read_split(arguments, split, *_columns(arguments, split))
    return None if table is None else _of_table(arguments, split, table, Path())


def from_table(arguments: Any, split: str, path: Path) -> Examples:
    required, optional = _columns(arguments, split)
    if path.suffix.lower() == ".parquet" and _holds_pictures(path, arguments.image_column):
        rows = _parquet_rows(path, arguments.image_column)
        check_columns(rows, str(path), required)
        table = table_of(rows, str(path), required, optional)
    else:
        table = read_table(path, arguments.encoding, required, optional)
    return _of_table(arguments, split, table, path.parent)


def _of_table(arguments: Any, split: str, table: Table, folder: Path) -> Examples:
    """`folder`: from which its paths are."""
    label, id_column = arguments.label_column, arguments.id_column
    if split == "test":
        check_ids(table, id_column)
    images = EncodedImages(table.columns[arguments.image_column], folder, table.where)
    declared = tuple(table.classes.get(label, ()))
    return Examples(table.path, images, table.columns.get(label), table.where, ids_of(table, id_column), declared)


def _holds_pictures(path: Path, column: str) -> bool:
    """Whether a parquet file's column holds the pictures themselves and not their paths. False for a file that cannot be read:
    the reader of tables says why."""
    try:
        schema = pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError):
        return False
    kind = schema.field(column).type if column in schema.names else pyarrow.null()
    return pyarrow.types.is_struct(kind) or pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)


def _parquet_rows(path: Path, column: str) -> datasets.Dataset:
    """The rows of a parquet file, mapped from a copy in the cache of `datasets`; pictures are not decoded."""
    import datasets  # takes half a second: not for pictures in memory

    try:
        return datasets.Dataset.from_parquet(str(path)).cast_column(column, datasets.Image(decode=False))
    except Exception as error:  # of pyarrow and of `datasets`
        raise InputError(f"{path}: cannot be read ({str(error).splitlines()[0][:200]})") from None
