"""Buffers of training rows, read on demand from files or a data set that do not fit on the disk.

A pass reads all shards (files, or shards of the data set) one after the other, in an order shuffled for each
pass. Buffers are consecutive pieces of these passes and have equal sizes. So a buffer depends on (seed,
position of its first row) alone, and no row repeats before all others were read.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from samerun.data.cache import (
    cache_folder,
    file_version,
    fingerprint,
    get_or_create,
    use_cache_folder,
)
from samerun.data.files import Row, kind_of, location, read_rows
from samerun.data.splits import check_columns, expand_patterns, load_from, local_files, open_stream
from samerun.data.tables import (
    FILE,
    Source,
    Table,
    cell_of,
    class_names,
    is_blank,
    open_rows,
    write_rows,
)
from samerun.errors import InputError, collecting, in_short
from samerun.output.progress import counted

if TYPE_CHECKING:
    import datasets

FORMAT_VERSION = "1"  # of the cached buffers; part of their cache key
SHARDS = 1  # random stream of the order of shards; the order of rows has another one
MANIFEST = "buffer.json"  # beside a buffer's rows

# The position of a row: (number of the pass, index of its shard in the pass, rows of the shard before it).
Position = tuple[int, int, int]
START: Position = (0, 0, 0)


class Shard(NamedTuple):
    """A file, or a shard of a data set. `read` returns its kind (as in `Table`) and its rows."""

    path: str
    read: Callable[[], tuple[str, Iterator[Row]]]


class Buffers:
    """Reads buffers of training rows on demand and caches them on the disk until `remove`."""

    def __init__(self, arguments: Any, columns: tuple[str, ...]) -> None:
        """`columns`: the columns to read. Raises `InputError` for missing files."""
        self.size = arguments.streaming_buffer_rows or arguments.default_buffer_rows
        self.columns, self.text_column, self.seed = (
            tuple(dict.fromkeys(columns)),
            arguments.text_column,
            arguments.seed,
        )
        self.classes: dict[str, list[str]] = {}
        if arguments.train_file is not None:
            self.shards, key = _files(arguments, self.columns)
        elif arguments.dataset_name is not None:
            self.shards, key, self.classes = _dataset(arguments, self.columns)
        else:
            raise InputError("no train rows: give --train_file or --dataset_name")
        # Machines may share the cache, and each run removes its own buffers: one folder per machine and run.
        run = [platform.node(), os.path.realpath(str(arguments.output_dir))]
        self._folder = cache_folder("buffers") / fingerprint(run)[:40]
        settings = [
            FORMAT_VERSION,
            arguments.encoding,
            str(self.seed),
            str(self.size),
            self.text_column,
            *self.columns,
        ]
        self._key = fingerprint([*settings, *key])[:40]
        # (process, position, rows from there): the next buffer continues reading. A forked process shares the
        # position in the open file, so it must open the file itself.
        self._next: tuple[int, Position, Iterator] | None = None

    @property
    def fingerprint(self) -> str:
        """A hash of the names of the shards. It ignores their content: users may correct a bad row and
        resume."""
        return fingerprint(os.path.basename(shard.path) for shard in self.shards)[:16]

    def cached_with(self, number: int) -> AbstractContextManager[None]:
        """A context in which all cached files are stored with this buffer, so that `remove` deletes them
        too."""
        return use_cache_folder(self._folder / f"{number}-{self._key}")

    def read(self, number: int, start: Position = START) -> tuple[Table, Position, int]:
        """Returns (rows of the buffer, start of the next buffer, number of skipped rows without text).

        Raises `InputError` for errors in the files, and if the first pass has fewer rows than a buffer.
        """
        with self.cached_with(number):
            folder = get_or_create("rows", "-".join(map(str, start)), partial(self._store, tuple(start)))
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sources = tuple(Source(path, kind, 0) for path, kind, _ in manifest["sources"])
        counts = [rows for _, _, rows in manifest["sources"]]
        source = np.repeat(np.arange(len(sources), dtype=np.int32), counts)
        rows = open_rows(folder).add_column(FILE, source)
        path = sources[0].path + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")
        table = Table(f"{path}, buffer {number + 1}", sources[0].kind, rows, self.classes, sources)
        return table, tuple(manifest["next"]), manifest["blank"]

    def remove(self, keeps: Callable[[int], bool]) -> None:
        """Removes the run's buffers, except those with `keeps(number)`. Outdated buffers are always
        removed."""
        for path in self._folder.glob("*-*"):
            number, _, key = path.name.partition("-")
            if key != self._key or not keeps(int(number)):
                shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            self._folder.rmdir()  # unless buffers are left

    def _store(self, start: Position, folder: Path) -> None:
        continues = self._next is not None and self._next[:2] == (os.getpid(), start)
        rows = self._next[2] if continues else self._rows(start)
        self._next = None
        buffer = _Buffer(self.size, self.text_column, start)
        taken = counted(buffer.take(rows), "reading", "rows", self.size)
        write_rows(folder / "rows.arrow", taken, self.columns, buffer.where)
        manifest = {"sources": buffer.sources, "next": buffer.end, "blank": buffer.blank}
        (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        self._next = (os.getpid(), buffer.end, rows)

    def _rows(self, start: Position) -> Iterator[tuple[Position, Shard, str, Row]]:
        """Yields (position after the row, shard, its kind, row) from `start` on, pass after pass, without
        end."""
        number, first, skipped = start
        while True:
            order = np.random.default_rng([self.seed, number, SHARDS]).permutation(len(self.shards)).tolist()
            for index in range(first, len(order)):
                shard = self.shards[order[index]]
                kind, rows = shard.read()
                for rows_read, row in enumerate(islice(rows, skipped, None), skipped + 1):
                    yield (number, index, rows_read), shard, kind, row
                skipped = 0
            number, first = number + 1, 0


class _Buffer:
    """Takes the rows of one buffer and collects its manifest."""

    def __init__(self, size: int, text_column: str, start: Position) -> None:
        self.size, self.text_column, self.start, self.end = size, text_column, start, start
        self.sources: list[list[Any]] = []  # [path, kind, number of rows] of each shard
        self.blank = 0

    def take(self, rows: Iterator[tuple[Position, Shard, str, Row]]) -> Iterator[Row]:
        """Yields `size` rows, skipping rows without visible text."""
        taken = 0
        while taken < self.size:
            end, shard, kind, row = next(rows)
            if self.start == START and end[0] > 0:
                raise InputError(
                    f"--streaming: there are {taken} training rows with a text, fewer than a buffer "
                    f"of {self.size}; leave "
                    "--streaming out or set a smaller --streaming_buffer_rows"
                )
            self.end, text = end, row[1].get(self.text_column)
            if isinstance(text, str) and is_blank(text):
                self.blank += 1
                continue
            if not self.sources or self.sources[-1][0] != shard.path:
                self.sources.append([shard.path, kind, 0])
            self.sources[-1][2] += 1
            taken += 1
            yield row

    def where(self, line: int) -> str:
        """The location of a row in the current shard, for messages."""
        return location(*self.sources[-1][:2], line)


def _files(arguments: Any, columns: tuple[str, ...]) -> tuple[list[Shard], list[str]]:
    """Returns (files of --train_file, their cache key parts)."""
    paths = [path for path, _ in expand_patterns("--train_file", arguments.train_file)]
    problems, key = [], []
    for path in paths:
        with collecting(problems):
            kind_of(path)
            key.append(file_version(path))
    if problems:
        raise InputError(*problems)
    return [
        Shard(path, partial(read_rows, path, arguments.encoding, columns, columns)) for path in paths
    ], key


def _dataset(arguments: Any, columns: tuple[str, ...]) -> tuple[list[Shard], list[str], dict[str, list[str]]]:
    """Returns (shards of the training split of --dataset_name, their cache key parts, class names by
    column)."""
    split = arguments.dataset_split or "train"
    dataset, version = load_from(arguments, "train", partial(open_stream, split))
    if (
        dataset.column_names is not None
    ):  # unknown for some formats; then the reader of the rows finds a missing column
        check_columns(dataset, f"dataset {arguments.dataset_name}, split {split}", columns)
    features = dataset.features or {}
    classes = {name: names for name in columns if (names := class_names(features.get(name))) is not None}
    shards = [
        Shard(
            f"{arguments.dataset_name} ({split}), shard {index}",
            partial(_read_shard, dataset, index, columns),
        )
        for index in range(dataset.num_shards)
    ]
    files = map(file_version, local_files(arguments.dataset_name))
    return shards, [version, split, *files], classes


def _read_shard(
    dataset: datasets.IterableDataset, index: int, columns: tuple[str, ...]
) -> tuple[str, Iterator[Row]]:
    return "parquet", _shard_rows(dataset, index, columns)


def _shard_rows(dataset: datasets.IterableDataset, index: int, columns: tuple[str, ...]) -> Iterator[Row]:
    """Raises `InputError` if the shard cannot be read."""
    features, row = dataset.features or {}, 0
    labels = {name: class_names(features.get(name)) for name in columns}
    try:
        for row, cells in enumerate(dataset.shard(dataset.num_shards, index), 1):
            yield row, {name: cell_of(labels[name], cells.get(name)) for name in columns}
    except Exception as error:
        raise InputError(
            f"--dataset_name: shard {index} cannot be read after row {row} ({in_short(error)})"
        ) from error
