"""Streaming: training rows that do not fit on the disk are read during training, buffer by buffer.

A pass reads all shards (files, or shards of a data set) one after the other, in an order shuffled for each
pass. Buffers are consecutive pieces of these passes and have equal sizes; a buffer is shuffled as a whole and
is one epoch. So a buffer depends on (seed, position of its first row) alone, and no row repeats before all
others were read. The position is part of a checkpoint: a resumed run continues in the middle of a buffer.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import platform
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from samerun.console import counted
from samerun.data.cache import cache_folder, content_key, file_version, get_or_create, use_cache_folder
from samerun.data.files import Row, cell_of, class_columns, common_classes, file_kind, location, read_rows
from samerun.data.splits import check_columns, expand_patterns, load_from, local_files, open_stream, parts_of
from samerun.data.tables import FILE, Source, Table, class_names, is_blank, open_rows, write_rows
from samerun.errors import InputError, collecting, in_short, raise_problems
from samerun.signals import ignore_signals
from samerun.task import Split

if TYPE_CHECKING:
    import datasets

FORMAT_VERSION = "3"  # of the cached buffers; part of their cache key
SHARDS = 1  # random stream of the order of shards; the order of rows has another one
MANIFEST = "buffer.json"  # beside a buffer's rows

# The position of a row: (number of the pass, index of its shard in the pass, rows of the shard before it).
Position = tuple[int, int, int]
START: Position = (0, 0, 0)


class Stream(ABC):
    """Training rows in buffers of equal size: epoch k trains on buffer k.

    Reading a buffer returns the start of the next one. Checkpoints contain the start, so a resumed run
    continues after the rows that were trained on. The start determines the rows of a buffer: a process
    without the cached buffer reads it again.
    """

    def __init__(self, second: Any) -> None:
        """`second`: the start of buffer 1. Buffer 0 is the split that the stream belongs to."""
        self._starts = {1: second}
        self._requests: Connection | None = None  # pipe to the read-ahead process, in its parent

    @abstractmethod
    def read(self, epoch: int, start: Any) -> tuple[Split, Any]:
        """(rows of the epoch that has this start, start of the next one). Starts are JSON values. Cache
        expensive results on the disk for the other processes of the machine. Raises `InputError` for bad
        rows."""

    def remove(self, keeps: Callable[[int], bool]) -> None:
        """Removes the files that `read` cached, except those of epochs with `keeps(epoch)`."""
        return

    def start_reading_ahead(self) -> None:
        """Starts the process that reads each next buffer in advance; one is enough for a machine. Call it
        before model and process group are created: the fork would keep copies of them."""
        requests, self._requests = multiprocessing.Pipe(duplex=False)
        fork = multiprocessing.get_context("fork")
        ends = requests, self._requests
        fork.Process(target=self._read_ahead, args=ends, name="read-ahead", daemon=True).start()
        requests.close()

    def begin(self, epoch: int, start: Any) -> None:
        """Training starts in this epoch. `start`: its `start_of`, from the checkpoint; None for epoch 0."""
        if epoch > 0:
            self._starts[epoch] = start
        if self._requests is not None:  # remove leftovers of an interrupted run
            self.remove(lambda number: number in (0, epoch, epoch + 1))

    def start_of(self, epoch: int) -> Any:
        """The start of an epoch, if the epoch before it was read; None for epoch 0."""
        return self._starts.get(epoch)

    def split(self, epoch: int) -> Split:
        """The rows of an epoch >= 1. Reads the epochs before it if their starts are unknown."""
        for number in range(max(known for known in self._starts if known <= epoch), epoch + 1):
            split, self._starts[number + 1] = self.read(number, self._starts[number])
        return split

    def enter(self, epoch: int, is_last: bool) -> None:
        """Training enters this epoch, whose rows were read: starts reading the next buffer and removes
        earlier ones. Buffer 0 stays: a resumed run prepares its task from it, such as the list of labels."""
        gc.collect()  # files stay on the disk while any object maps them into memory
        if self._requests is None:
            return
        self.remove(lambda number: number == 0 or number >= epoch)
        if not is_last:
            with contextlib.suppress(OSError):  # if the process died, the next buffer is read on demand
                self._requests.send((epoch + 1, self._starts[epoch + 1]))

    def close(self) -> None:
        """Training has ended: ends the read-ahead process and removes all buffers."""
        if self._requests is not None:
            self._requests.close()  # the process ends at the end of its input
            self.remove(lambda number: False)

    def _read_ahead(self, requests: Connection, sending: Connection) -> None:
        sending.close()  # an open copy would keep `recv` from seeing the end of the training
        self._requests = None
        null_device = os.open(os.devnull, os.O_RDWR)
        for output in (1, 2):  # the training process reports bad rows when it needs them
            os.dup2(null_device, output)
        ignore_signals()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # collections below need not scan the parent's objects
        with contextlib.suppress(EOFError):
            while True:
                epoch, start = requests.recv()
                with contextlib.suppress(Exception):
                    self.read(epoch, start)
                gc.collect()


class Shard(NamedTuple):
    """A file, or a shard of a data set. `read` returns its kind (as in `Table`) and its rows."""

    path: str
    read: Callable[[], tuple[str, Iterator[Row]]]


class Buffers:
    """Reads buffers of training rows on demand and caches them on the disk until `remove`."""

    def __init__(self, arguments: Any, columns: tuple[str, ...]) -> None:
        """`columns`: the columns to read. Raises `InputError` for missing files."""
        self.size = arguments.streaming
        self.columns, self.text_column = tuple(dict.fromkeys(columns)), arguments.text_column
        self.seed = arguments.seed
        self.classes: dict[str, list[str]] = {}
        if arguments.train_file is not None:
            self.shards, key, self.classes = _files(arguments, self.columns)
        elif arguments.dataset_name is not None:
            self.shards, key, self.classes = _dataset(arguments, self.columns)
        else:
            raise InputError("no train rows: give --train_file or --dataset_name")
        # Machines may share the cache, and each run removes its own buffers: one folder per machine and run.
        run = [platform.node(), os.path.realpath(str(arguments.output_dir))]
        self._folder = cache_folder("buffers") / content_key(run)[:40]
        settings = [FORMAT_VERSION, arguments.encoding, str(self.seed), str(self.size), self.text_column]
        self._key = content_key([*settings, *self.columns, *key])[:40]
        # (process, position, rows from there): the next buffer continues reading. A forked process shares the
        # position in the open file, so it must open the file itself.
        self._next: tuple[int, Position, Iterator] | None = None

    @property
    def fingerprint(self) -> str:
        """A hash of the shards' names, not of their content: users may correct a bad row and resume."""
        return content_key(os.path.basename(shard.path) for shard in self.shards)[:16]

    def cached_with(self, number: int) -> AbstractContextManager[None]:
        """A context in which all cached files are stored with this buffer: `remove` deletes them, too."""
        return use_cache_folder(self._folder / f"{number}-{self._key}")

    def read(self, number: int, start: Position = START) -> tuple[Table, Position, int]:
        """(rows of the buffer, start of the next buffer, number of skipped rows without text). If all shards
        have fewer rows than a buffer, all buffers become that small; read buffer 0 first. Raises `InputError`
        for errors in the files, and if no row has a text."""
        with self.cached_with(number):
            folder = get_or_create("rows", "-".join(map(str, start)), partial(self._store, tuple(start)))
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        paths, kinds, counts = zip(*manifest["sources"], strict=True)
        rows = open_rows(folder)
        self.size = len(rows)
        rows = rows.add_column(FILE, np.repeat(np.arange(len(paths), dtype=np.int32), counts))
        path = paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        sources = tuple(Source(path, kind, 0) for path, kind in zip(paths, kinds, strict=True))
        table = Table(f"{path}, buffer {number + 1}", kinds[0], rows, self.classes, sources)
        return table, tuple(manifest["next"]), manifest["blank"]

    def remove(self, keeps: Callable[[int], bool]) -> None:
        """Removes the run's buffers: outdated ones, and those without `keeps(number)`."""
        for path in self._folder.glob("*-*"):
            number, _, key = path.name.partition("-")
            if key != self._key or not keeps(int(number)):
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # unless buffers are left

    def _store(self, start: Position, folder: Path) -> None:
        continues = self._next is not None and self._next[:2] == (os.getpid(), start)
        rows = self._next[2] if continues else self._rows(start)
        buffer = _Buffer(rows, self.size, self.text_column, start)
        taken = counted(buffer, "reading", "rows", self.size)
        write_rows(folder / "rows.arrow", taken, self.columns, buffer.where)
        manifest = {"sources": buffer.sources, "next": buffer.end, "blank": buffer.blank}
        (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        self._next = None if buffer.is_short else (os.getpid(), buffer.end, rows)

    def _rows(self, start: Position) -> Iterator[tuple[Position, Shard, str, Row]]:
        """Yields (position after the row, shard, its kind, row) from `start` on, in passes that end only if
        there are no rows at all."""
        number, first, skipped = start
        is_empty = False
        while not is_empty:
            is_empty = number > start[0]  # unless a row comes; the first pass may begin behind its last one
            order = np.random.default_rng([self.seed, number, SHARDS]).permutation(len(self.shards)).tolist()
            for index in range(first, len(order)):
                shard = self.shards[order[index]]
                kind, rows = shard.read()
                found = sum(1 for _ in islice(rows, skipped))
                if found < skipped:
                    raise InputError(
                        f"{shard.path}: has {found} rows, but this run has already read {skipped} of it; put "
                        "the file back as it was"
                    )
                for rows_read, row in enumerate(rows, skipped + 1):
                    is_empty = False
                    yield (number, index, rows_read), shard, kind, row
                skipped = 0
            number, first = number + 1, 0


class _Buffer:
    """Takes the `size` rows of one buffer, skips those without visible text, and collects its manifest."""

    def __init__(self, rows: Iterator, size: int, text_column: str, start: Position) -> None:
        self.rows, self.size, self.text_column, self.start, self.end = rows, size, text_column, start, start
        self.sources: list[list[Any]] = []  # [path, kind, number of rows] of each shard
        self.blank = 0
        self.is_short = False  # whether all shards together have fewer rows

    def __iter__(self) -> Iterator[Row]:
        taken = 0
        for end, shard, kind, row in self.rows:
            if self.start == START and end[0] > 0:
                self.is_short = True
                break
            self.end, text = end, row[1].get(self.text_column)
            # Buffers would have other sizes if tasks left out rows. Blank words are an error of the task's.
            if isinstance(text, list) and all(isinstance(word, str) and word.strip() for word in text):
                text = "".join(text)
            if isinstance(text, str) and is_blank(text):
                self.blank += 1
                continue
            if not self.sources or self.sources[-1][0] != shard.path:
                self.sources.append([shard.path, kind, 0])
            self.sources[-1][2] += 1
            taken += 1
            yield row
            if taken == self.size:
                return
        if not taken:
            raise InputError(f"--streaming: no row has a {self.text_column}; nothing to train on")

    def where(self, line: int) -> str:
        """The location of a row in the current shard, for messages."""
        return location(*self.sources[-1][:2], line)


def _files(arguments: Any, columns: tuple[str, ...]) -> tuple[list[Shard], list[str], dict[str, list[str]]]:
    """(files of --train_file, their cache key parts, class names by column)."""
    paths = [path for path, _ in expand_patterns("--train_file", arguments.train_file)]
    problems, key = [], []
    for path in paths:
        with collecting(problems):
            file_kind(path)
            key.append(file_version(path))
    raise_problems(problems)
    read = partial(_read_unchanged, encoding=arguments.encoding, columns=columns)
    shards = [Shard(path, partial(read, path, os.stat(path))) for path in paths]
    return shards, key, common_classes(list(map(class_columns, paths)))


def _read_unchanged(
    path: str, before: os.stat_result, encoding: str, columns: tuple[str, ...]
) -> tuple[str, Iterator[Row]]:
    """`read_rows` of a file. Raises `InputError`, also behind the last row, if it changes during the run."""

    def check() -> None:
        now = os.stat(path)  # not its `file_version`: a link to it or other permissions change no row
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise InputError(
                f"{path}: was changed during the run; start it again with --resume_from_checkpoint auto"
            )

    def unchanged(rows: Iterator[Row]) -> Iterator[Row]:
        yield from rows
        check()

    check()
    kind, rows = read_rows(path, encoding, columns, columns)
    return kind, unchanged(rows)


def _dataset(arguments: Any, columns: tuple[str, ...]) -> tuple[list[Shard], list[str], dict[str, list[str]]]:
    """(shards of the training split of --dataset_name, their cache key parts, class names by column)."""
    split = arguments.dataset_splits.get("train", "train")
    dataset, version = load_from(arguments, "train", partial(open_stream, split))
    if dataset.column_names is not None:  # unknown for some formats; then the reader of the rows finds it
        check_columns(dataset, f"dataset {arguments.dataset_name}, split {split}", columns)
    features = dataset.features or {}
    names = {name: class_names(features.get(name)) for name in columns}
    shards = [
        Shard(
            f"{arguments.dataset_name} ({split}), shard {index}",
            lambda index=index: ("parquet", _shard_rows(dataset, index, names)),
        )
        for index in range(dataset.num_shards)
    ]
    files = map(file_version, local_files(parts_of(arguments.dataset_name)[0]))
    classes = {name: labels for name, labels in names.items() if labels is not None}
    return shards, [version, split, *files], classes


def _shard_rows(
    dataset: datasets.IterableDataset, index: int, names: dict[str, list[str] | None]
) -> Iterator[Row]:
    """`names`: of classes, by column. Raises `InputError` if the shard cannot be read."""
    row = 0
    try:
        for row, cells in enumerate(dataset.shard(dataset.num_shards, index), 1):
            yield row, {name: cell_of(labels, cells.get(name)) for name, labels in names.items()}
    except Exception as error:
        raise InputError(
            f"--dataset_name: shard {index} cannot be read after row {row} ({in_short(error)})"
        ) from error
