"""The pictures of a split with the classes that stand beside them, from any of the forms that users have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.parquet

from finetune.errors import InputError
from finetune.images.folders import class_folders
from finetune.images.idx import images_file, is_idx, labels_file, read_idx
from finetune.images.sources import ArrayImages, EncodedImages, Images, Renumbered
from finetune.reading.columns import check_ids, ids_of, take
from finetune.reading.splits import check_columns, read_split, table_of

if TYPE_CHECKING:
    import datasets

LIMITS = {"train": "max_train_samples", "validation": "max_eval_samples", "test": "max_predict_samples"}


@dataclass(frozen=True)
class Examples:
    """`classes`: what the source has as each row's class, None where it has none. `where`: what messages call a row.
    `declared`: the names of all classes, in their order, where the source gives them."""

    path: str
    images: Images
    classes: Sequence[Any] | None
    where: Callable[[int], str]
    ids: Sequence[Any]
    declared: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: np.ndarray) -> Examples:
        # Lists first: one cell of a table at a time is slow.
        classes, ids = (None if cells is None else list(cells) for cells in (self.classes, self.ids))
        classes, ids = classes and [classes[row] for row in rows], [ids[row] for row in rows]
        return replace(self, images=self.images.take(rows), classes=classes, ids=ids, where=Renumbered(self.where, rows))


def read_examples(arguments: Any, split: str, notes: list[str]) -> Examples | None:
    """The pictures of "train", "validation" or "test" from `--*_file`, a folder or a file, or from --dataset_name; None when
    neither is given. `arguments`: those of ImageArguments.

    Raises `InputError` for what is wrong with the source; the pictures themselves are looked at by `Images.inspect`.
    """
    named = getattr(arguments, f"{split}_file")
    path = None if named is None else Path(named)
    if path is None or not (path.is_dir() or is_idx(path)):
        return _from_table(arguments, split, path, notes)
    images = path if path.is_file() else images_file(path, split)
    found = _from_folder(path, notes) if images is None else _from_idx(images)
    most = getattr(arguments, LIMITS[split])
    if most is None or most >= len(found):
        return found
    # A folder's first pictures are all of one class.
    return found.take(np.arange(most) if images else np.linspace(0, len(found) - 1, most).astype(np.int64))


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


def _from_folder(path: Path, notes: list[str]) -> Examples:
    pictures, classes = class_folders(path, notes)
    ids = [str(picture.relative_to(path)) for picture in pictures]
    images = EncodedImages(ids, path)
    return Examples(str(path), images, classes, images.name, ids)


def _from_table(arguments: Any, split: str, path: Path | None, notes: list[str]) -> Examples | None:
    image, label, id_column = arguments.image_column, arguments.label_column, arguments.id_column
    if image == label:
        raise InputError(f"column {image!r} is used twice; pictures and labels need columns of their own")
    is_test = split == "test"
    required = (image, *([] if is_test else [label]), *([id_column] if is_test and id_column != "id" else []))
    optional = (label, *([id_column] if is_test else []))
    if path is not None and path.suffix.lower() == ".parquet" and _holds_pictures(path, image):
        rows = _parquet_rows(path, image)
        check_columns(rows, str(path), required)
        table = table_of(rows, str(path), required, optional)
        most = getattr(arguments, LIMITS[split])
        table = table if most is None or most >= len(table) else take(table, np.arange(most))
    else:
        table = read_split(arguments, split, required, optional)
    if table is None:
        return None
    if is_test:
        check_ids(table, id_column)
    folder = path.parent if path is not None else Path()
    images = EncodedImages(table.columns[image], folder, table.where)
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
