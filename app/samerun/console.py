"""Console output and progress. Printing never fails, even if the console goes away (`| head`, a closed
terminal or stdout, a full disk).

A phase of a run has a bar if stdout and stderr are a terminal: on stderr, until the phase ends. Otherwise it
prints lines, the first after 10 s and then ever fewer: all phases together print about 150 lines a day.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from samerun.errors import as_shown

if TYPE_CHECKING:
    from rich.progress import Progress

STDOUT = ("-", "/dev/stdout")  # as the name of a file
NAME_WIDTH = 15  # columns of the name that begins a line: "note           ..."
BAR_DELAY = 1.0  # seconds before a phase gets a bar
REFRESH_INTERVAL = 0.1  # seconds
LINE_INTERVAL = 10.0  # seconds between two lines of a log, at least
LINE_SHARE = 0.05  # of the time since the first phase began: the next line comes after it


def say(*lines: str) -> None:
    """Prints lines to stdout, unless silenced. Warnings and errors go to stderr instead.

    On a terminal, long lines are wrapped at words, and their continuations line up behind the 15 columns of a
    line's name.
    """
    if Phase.quiet:
        return
    for line in map(as_shown, lines):
        if sys.stdout.isatty():
            line = textwrap.fill(
                line,
                max(shutil.get_terminal_size().columns, 3 * NAME_WIDTH),
                subsequent_indent=" " * NAME_WIDTH,
                break_long_words=False,
                break_on_hyphens=False,
            )
        print(line, flush=True)


def plain_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table with columns of equal widths."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]


def duration(seconds: float) -> str:
    """In hours, minutes or seconds, whichever is at least 2."""
    units = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
    size, unit = next((each for each in units if seconds >= 2 * each[0]), units[-1])
    return f"{seconds / size:.1f} {unit}"


class _LossyFile(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def survive_a_lost_console() -> None:
    """Makes printing never fail. Opens /dev/null in place of a closed standard stream: otherwise the next
    file that is opened would get its descriptor, and with it whatever libraries print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    sys.stdout = _lossy(sys.stdout, 1)
    sys.stderr = _lossy(sys.stderr, 2)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def _lossy(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None:
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False)),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=os.isatty(descriptor) or descriptor == 2,
        write_through=getattr(stream, "write_through", False),
    )


class Phase:
    """A part of a run with a progress bar. Use it as a context manager; `update` counts.

    `total` may be unknown. Without a `unit` nothing is counted: a terminal shows the phase while it lasts.
    `done`: where a resumed run begins. Rates exclude earlier work and the time of nested phases.
    """

    quiet: ClassVar[bool] = False  # silences `say`, too (--log_level warning)
    running: ClassVar[list[Phase]] = []  # outermost first
    display: ClassVar[Progress | None] = None  # of all bars: a nested phase has its bar below the outer one
    first_began: ClassVar[float | None] = None
    last_line: ClassVar[float] = 0.0

    def __init__(
        self, name: str, unit: str = "", total: int | None = None, done: int = 0, shown: bool = True
    ) -> None:
        self.name, self.unit, self.total, self.done, self.first = name, unit, total, done, done
        self.shown = shown and not Phase.quiet
        self.note = ""
        self.process = os.getpid()
        self.bar: Any = None

    def start(self) -> Phase:
        self.started = self.began = self.refreshed = time.monotonic()
        if Phase.first_began is None:
            Phase.first_began = self.began
        Phase.running.append(self)
        if not self.unit:
            self.update(0)
        return self

    def stop(self) -> None:
        """Ends the phase. A second call does nothing."""
        if self not in Phase.running:
            return
        Phase.running.remove(self)
        if Phase.running:
            Phase.running[-1].started += time.monotonic() - self.began
        if self.bar is not None:
            Phase.display.remove_task(self.bar)
            self.bar = None
        if not Phase.running and Phase.display is not None:
            Phase.display.stop()
            Phase.display = None

    def __enter__(self) -> Phase:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def update(self, number: int = 1, note: str | None = None) -> None:
        """Counts `number` more units. `note`: a text to show in place of the rate, such as a loss."""
        self.done += number
        self.note = self.note if note is None else note
        if not self.shown:
            return
        now = time.monotonic()
        # Lines in a pipe (`| tee run.log`) would appear inside bars. Only the process that made the phase
        # draws its bar; forked workers print lines.
        if sys.stderr.isatty() and sys.stdout.isatty() and os.getpid() == self.process:
            if not self.unit or (now - self.began >= BAR_DELAY and now - self.refreshed >= REFRESH_INTERVAL):
                self.refreshed = now
                self._draw()
        elif self.unit and now - max(self.began, Phase.last_line) >= max(
            LINE_INTERVAL, LINE_SHARE * (now - Phase.first_began)
        ):
            Phase.last_line = now
            say(f"{self.name:<{NAME_WIDTH - 1}} {self.describe()}")

    @property
    def rate(self) -> float:
        """Units per second; 0 at the start."""
        seconds, done = time.monotonic() - self.started, self.done - self.first
        return done / seconds if seconds > 0 else 0.0

    def describe(self) -> str:
        """The count, the note or the rate, and the remaining time, for a log line."""
        count, note, left = self._parts(" of ")
        return ", ".join(part for part in (f"{count} {self.unit}", note, left and f"{left} left") if part)

    def _parts(self, separator: str) -> tuple[str, str, str]:
        """(count, note or rate, remaining time)."""
        if not self.unit:
            return "", "", ""
        rate = f"{self.rate:,.{0 if self.rate >= 10 else 2}f} {self.unit}/s" if self.rate else ""
        left = _clock((self.total - self.done) / self.rate) if self.total and self.rate else ""
        return (
            f"{self.done:,}{separator}{self.total:,}" if self.total else f"{self.done:,}",
            self.note or rate,
            left,
        )

    def _draw(self) -> None:
        if Phase.display is None:
            from rich.console import Console  # only a terminal shows bars
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            # No refresh thread: worker processes are forked.
            Phase.display = Progress(
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}", style="default", table_column=Column(no_wrap=True)),
                console=Console(stderr=True, highlight=False),
                auto_refresh=False,
                transient=True,
                expand=True,
            )
            Phase.display.start()
            Phase.display.console.show_cursor(True)  # a killed process could not restore it
        state = {"completed": self.done, "text": "  ".join(part for part in self._parts("/") if part)}
        if self.bar is None:
            name = _shortened(self.name, Phase.display.console.width // 3)
            self.bar = Phase.display.add_task(name, total=self.total, **state)
        Phase.display.update(self.bar, **state, refresh=True)


def counted(items: Iterable[Any], name: str, unit: str, total: int | None = None) -> Iterator[Any]:
    """Yields the items and shows their progress."""
    with Phase(name, unit, total) as phase:
        for item in items:
            yield item
            phase.update()


def _shortened(name: str, width: int) -> str:
    """A name of at most `width` columns: its beginning, and the end of its path."""
    return name if len(name) <= width else f"{name[: width // 2]}…{name[len(name) + 1 - (width + 1) // 2 :]}"


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
