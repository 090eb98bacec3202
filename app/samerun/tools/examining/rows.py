"""The rows of any task as the data report compares them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from samerun.data.cache import fingerprint
from samerun.data.tokens import Ragged
from samerun.images.data import map_rows
from samerun.images.image_task import ImageTask
from samerun.plan import Modes
from samerun.runtime import Launch
from samerun.task import Task
from samerun.text.text import TextTask

WORD = re.compile(r"\w+")
AXES = ("left-right", "back-front", "down-up")


class Rows(NamedTuple):
    """Properties of a split's rows, in their order."""

    contents: Sequence[Hashable]  # a key per row, equal for duplicates
    similar: Sequence[Hashable]  # equal for near duplicates
    similarity: str  # what near duplicates are, such as "equal but for case"
    answers: Sequence[Hashable] | None = None  # targets, which should be equal for duplicates
    labels: Sequence[tuple[str, ...]] | None = None  # label names of each row
    blank: Sequence[bool] = ()
    lengths: np.ndarray | None = None  # (rows,) in `unit`
    unit: str = ""
    limit: int | None = None  # the longest length that the model reads
    sizes: Mapping[str, np.ndarray] = MappingProxyType({})  # (rows,) by the name of the dimension
    areas: tuple[Sequence[str], np.ndarray] | None = None  # class names; (rows, classes) pixels or voxels


def rows_of(task: Task, modes: Modes) -> tuple[dict[str, Rows], list[str]]:
    """(rows by split, notes) of a task's files; {} for a task whose rows are of another kind."""
    arguments, launch, notes = task.arguments, Launch(), []
    if isinstance(task, TextTask) and not (
        arguments.model_name_or_path or arguments.tokenizer_name or arguments.tokenizer_type == "train"
    ):  # without a tokenizer, lengths are in words
        tables, targets = task.read(launch, modes, notes)
        rows = {}
        for name, table in tables.items():
            titles = table.columns.get(getattr(arguments, "title_column", None))
            texts = joined(*(table.columns[column] for column in task.text_columns))
            rows[name] = of_texts(texts, titles and list(titles), getattr(targets[name], "rows", None))
        return rows, notes
    data = task.load(launch, modes)
    if isinstance(task, TextTask):
        return {name: of_text_split(task, split) for name, split in data.splits.items()}, data.notes
    if isinstance(task, ImageTask):
        return {name: _of_images(task, name) for name in data.splits}, data.notes
    if hasattr(task, "prepared"):
        rows = {name: _of_volumes(task.prepared[name], task.settings.classes) for name in data.splits}
        return rows, data.notes
    return {}, data.notes


def joined(*columns: Iterable[str]) -> Iterable[str]:
    """The texts of each row as one text."""
    return columns[0] if len(columns) == 1 else map("\n".join, zip(*columns, strict=True))


def of_texts(
    texts: Iterable[str],
    titles: Sequence[str] | None,
    labels: Sequence[tuple[str, ...]] | None,
    tokens: tuple[np.ndarray, int] | None = None,
) -> Rows:
    """Texts with titles, labels or neither. `tokens`: ((rows,) lengths in tokens, their limit); without it
    lengths are in words."""
    contents, similar, num_words, blank = [], [], [], []
    for text in texts:
        words = WORD.findall(text)
        contents.append(hash(text))
        similar.append(hash(" ".join(words).casefold()) if words else contents[-1])
        num_words.append(len(words))
        blank.append(not text.strip())
    lengths, limit = (np.array(num_words), None) if tokens is None else tokens
    return Rows(
        contents,
        similar,
        "equal but for case, spaces and punctuation",
        titles if labels is None else [tuple(sorted(labels_of_row)) for labels_of_row in labels],
        labels,
        blank,
        lengths,
        "words" if tokens is None else "tokens",
        limit,
    )


def of_text_split(task: TextTask, split: Any) -> Rows:
    labels, titles = None, None if split.titles is None else list(split.titles)
    if split.titles is None and isinstance(split.targets, Ragged):
        targets = (split.targets[row].tolist() for row in range(len(split)))
        if split.targets.values.dtype.kind == "f":  # numbers of a regression
            titles = list(map(tuple, targets))
        else:
            labels = [tuple(task.labels[number] for number in row) for row in targets]
    texts = joined(split.texts, *([] if split.pairs is None else [split.pairs]))
    return of_texts(texts, titles, labels, (split.lengths, task.max_length))


def _of_images(task: ImageTask, name: str) -> Rows:
    """Images by the hashes of their files and of their pixels."""
    inspected, split = task.inspected[name], task.splits[name]
    similar = map_rows(partial(_pixel_hash, split.images), len(split), "comparing images", "images")
    rows = Rows(
        inspected.digests,
        similar,
        "of equal pixels, in files that are not equal",
        sizes={
            f"{side}, pixels": np.array([getattr(header, side) for header in inspected.headers])
            for side in ("width", "height")
        },
    )
    if split.targets is None:
        return rows
    if split.targets.counts is None:
        labels = [(task.labels[number],) for number in split.targets.values]
        return rows._replace(labels=labels, answers=labels)
    counts, names = split.targets.counts, task.classes.names
    areas = np.array([[of_mask.get(value, 0) for value in range(len(names))] for of_mask in counts])
    # Equal images should have equal counts of pixels.
    return rows._replace(answers=[tuple(sorted(of_mask.items())) for of_mask in counts], areas=(names, areas))


def _pixel_hash(images: Any, row: int) -> str:
    image = images.load(row, "RGB")
    return fingerprint([repr(image.size), image.tobytes()])


def _of_volumes(volumes: Sequence[Any], classes: Sequence[str]) -> Rows:
    """Volumes (`volumes.data.Prepared`) by the hashes of their files and of their voxels: compressed
    files of equal volumes differ."""
    labels, sizes, areas = [volume.files[1:] for volume in volumes], {}, None
    for name, unit in (("size", "voxels"), ("spacing", "mm")):
        values = np.array([volume.facts[name] for volume in volumes], dtype=float).reshape(-1, 3)
        sizes |= {f"{axis}, {unit}": column for axis, column in zip(AXES, values.T, strict=True)}
    if all(labels):
        counts = [
            [volume.facts["values"].get(str(value), 0) for value in range(len(classes))] for volume in volumes
        ]
        areas = classes, np.array(counts).reshape(-1, len(classes))
    return Rows(
        [volume.files[0] for volume in volumes],
        [fingerprint([repr(volume.facts["shape"]), volume.image.tobytes()]) for volume in volumes],
        "of equal voxels, in files that are not equal",
        labels if areas else None,
        sizes=sizes,
        areas=areas,
    )
