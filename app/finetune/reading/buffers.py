"""Rows of files, or of a data set of `datasets`, that do not fit on the disk: read in buffers, each when it is needed.

A pass over the rows takes the files (the shards of a data set) one after the other, shuffled anew in each pass; buffers are
consecutive pieces of these passes, all of the same size. So a buffer is a function of (seed, where it begins), and no row comes
a second time before all the others have come.
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

from finetune.errors import InputError
from finetune.output.progress import counted
from finetune.reading.cache import cache_folder, kept, kept_below
from finetune.reading.columns import shows_nothing
from finetune.reading.fingerprint import fingerprint
from finetune.reading.problems import place
from finetune.reading.splits import cell_of, check_columns, class_names, files_named, load_from, open_stream
from finetune.reading.stored_rows import Row, open_rows, write_rows
from finetune.reading.tables import Source, Table, kind_of, read_rows

if TYPE_CHECKING:
    import datasets

FORM = "1"  # of the stored buffers; another one reads them again
SHARDS = 1  # tells the order of shards from that of rows
BUFFER = "buffer.json"  # beside a buffer's rows: their sources, and what follows
START = (0, 0, 0)

# Where a row stands: the pass, the place of its shard in it, and how many rows of the shard come before.
Start = tuple[int, int, int]


class Shard(NamedTuple):
    """A file, or a part of a data set that can be read by itself. `read` gives its kind, as of a `Table`, and its rows."""

    path: str
    read: Callable[[], tuple[str, Iterator[Row]]]


class Buffers:
    """The buffers of training rows that are read once they are needed, and kept on the disk until they are removed."""

    def __init__(self, arguments: Any, columns: tuple[str, ...]) -> None:
        """`arguments`: with --streaming; `columns`: those that are read. Raises `InputError` for files that are missing."""
        self.size = arguments.streaming_buffer_rows or arguments.default_buffer_rows
        self.columns, self.text_column, self.seed = tuple(dict.fromkeys(columns)), arguments.text_column, arguments.seed
        self.classes: dict[str, list[str]] = {}
        if arguments.train_file is not None:
            self.shards, content = _files(arguments, self.columns)
        elif arguments.dataset_name is not None:
            self.shards, content, self.classes = _dataset(arguments, self.columns)
        else:
            raise InputError("no train rows: give --train_file or --dataset_name")
        # A machine's own, since the cache may be shared; and the run's, which removes what it does not need any more.
        run = [platform.node(), os.path.realpath(str(arguments.output_dir))]
        self._folder = cache_folder("buffers") / fingerprint(run)[:40]
        settings = [FORM, arguments.encoding, str(self.seed), str(self.size), self.text_column, *self.columns]
        self._key = fingerprint([*settings, *content])[:40]
        # Rows of a shard that this process has opened, and where they begin. A fork has the same file, and moves in it.
        self._next: tuple[int, Start, Iterator] | None = None

    @property
    def fingerprint(self) -> str:
        """A hash of the names of what is read, in their order. The content is not looked at: a row that is wrong is found while
        others are trained on, and may be corrected then."""
        return fingerprint(os.path.basename(shard.path) for shard in self.shards)[:16]

    def kept(self, number: int) -> AbstractContextManager[None]:
        """While it lasts, everything that is made once on a machine is kept with this buffer."""
        return kept_below(self._folder / f"{number}-{self._key}")

    def read(self, number: int, start: Start = START) -> tuple[Table, Start, int]:
        """(The rows of a buffer, where the next one begins, how many rows without a text were left out).

        Raises `InputError` for what is wrong with the files, and for a buffer that is larger than they are together.
        """
        with self.kept(number):
            folder = kept("rows", "-".join(map(str, start)), partial(self._store, tuple(start)))
        _, columns, lines = open_rows(folder, self.columns)
        about = json.loads((folder / BUFFER).read_text(encoding="utf-8"))
        sources = tuple(Source(path, kind, 0) for path, kind, _ in about["sources"])
        counts = [rows for _, _, rows in about["sources"]]
        path = sources[0].path + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")
        number_of = np.repeat(np.arange(len(sources), dtype=np.int32), counts)
        table = Table(f"{path}, buffer {number + 1}", sources[0].kind, columns, lines, self.classes, sources, number_of)
        return table, tuple(about["next"]), about["blank"]

    def remove(self, keeps: Callable[[int], bool]) -> None:
        """Removes the run's buffers but those whose number `keeps` is true for, and all that are of other rows."""
        for path in self._folder.glob("*-*"):
            number, _, key = path.name.partition("-")
            if key != self._key or not keeps(int(number)):
                shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            self._folder.rmdir()  # once it is empty

    def _store(self, start: Start, folder: Path) -> None:
        """Stores the buffer that begins there."""
        goes_on = self._next is not None and self._next[:2] == (os.getpid(), start)
        rows = self._next[2] if goes_on else self._rows(start)
        self._next = None
        buffer = _Buffer(self.size, self.text_column, start)
        taken = counted(buffer.take(rows), "reading", "rows", self.size)
        write_rows(folder, "rows", "stream", taken, self.columns, where=buffer.where)
        about = {"sources": buffer.sources, "next": buffer.end, "blank": buffer.blank}
        (folder / BUFFER).write_text(json.dumps(about), encoding="utf-8")
        self._next = (os.getpid(), buffer.end, rows)

    def _rows(self, start: Start) -> Iterator[tuple[Start, Shard, str, Row]]:
        """(where the row after it stands, shard, what it holds, row) of all rows from `start` on, without end."""
        number, first, skipped = start
        while True:
            order = np.random.default_rng([self.seed, number, SHARDS]).permutation(len(self.shards)).tolist()
            for position in range(first, len(order)):
                shard = self.shards[order[position]]
                kind, rows = shard.read()
                for row, found in enumerate(islice(rows, skipped, None), skipped + 1):
                    yield (number, position, row), shard, kind, found
                skipped = 0
            number, first = number + 1, 0


class _Buffer:
    """What is known of a buffer while it is read. `sources`: path, kind and number of rows of each shard, in their order."""

    def __init__(self, size: int, text_column: str, start: Start) -> None:
        self.size, self.text_column, self.start, self.end = size, text_column, start, start
        self.sources: list[list[Any]] = []
        self.blank = 0

    def take(self, rows: Iterator[tuple[Start, Shard, str, Row]]) -> Iterator[Row]:
        """As many rows as a buffer has, without those whose text shows nothing."""
        taken = 0
        while taken < self.size:
            end, shard, kind, row = next(rows)
            if self.start == START and end[0] > 0:
                raise InputError(
                    f"--streaming: there are {taken} training rows with a text, fewer than a buffer of {self.size}; leave "
                    "--streaming out, or give a smaller --streaming_buffer_rows"
                )
            self.end, text = end, row[1].get(self.text_column)
            if isinstance(text, str) and shows_nothing(text):
                self.blank += 1
                continue
            if not self.sources or self.sources[-1][0] != shard.path:
                self.sources.append([shard.path, kind, 0])
            self.sources[-1][2] += 1
            taken += 1
            yield row

    def where(self, line: int) -> str:
        """A row of the shard that is being read, in words."""
        return place(*self.sources[-1][:2], line)


def _files(arguments: Any, columns: tuple[str, ...]) -> tuple[list[Shard], list[str]]:
    """(the files of --train_file, what tells them from others)."""
    paths = [path for path, _ in files_named("--train_file", arguments.train_file)]
    problems, content = [], []
    for path in paths:
        try:
            kind_of(path)
            state = os.stat(path)
            content += [os.path.abspath(path), str(state.st_size), str(state.st_mtime_ns)]
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    return [Shard(path, partial(read_rows, path, arguments.encoding, columns, columns)) for path in paths], content


def _dataset(arguments: Any, columns: tuple[str, ...]) -> tuple[list[Shard], list[str], dict[str, list[str]]]:
    """(the shards of the training split of --dataset_name, what tells them from others, the names of columns of classes)."""
    shown = arguments.dataset_split or "train"
    found, version = load_from(arguments, "train", partial(open_stream, shown))
    path, number = f"{arguments.dataset_name} ({shown})", found.num_shards
    if found.column_names is not None:  # else rows without a column are found when they are read
        check_columns(found, f"dataset {arguments.dataset_name}, split {shown}", columns)
    features = found.features or {}
    classes = {name: names for name in columns if (names := class_names(features.get(name))) is not None}
    shards = [Shard(f"{path}, shard {each}", partial(_shard_rows, found, number, each, columns)) for each in range(number)]
    return shards, [version, shown], classes


def _shard_rows(
    dataset: datasets.IterableDataset, shards: int, number: int, columns: tuple[str, ...]
) -> tuple[str, Iterator[Row]]:
    return "parquet", _cells_of(dataset, shards, number, columns)


def _cells_of(dataset: datasets.IterableDataset, shards: int, number: int, columns: tuple[str, ...]) -> Iterator[Row]:
    """The rows of a shard, each with its number. Raises `InputError` where they cannot be read."""
    features, row = dataset.features or {}, 0
    try:
        for row, cells in enumerate(dataset.shard(shards, number), 1):
            yield row, {name: cell_of(features.get(name), cells.get(name)) for name in columns}
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"--dataset_name: shard {number} cannot be read behind row {row} ({reason})") from error
