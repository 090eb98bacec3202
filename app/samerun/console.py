"""Console output and progress. Printing never fails, even if the console goes away (`| head`, a closed
terminal or stdout, a full disk)."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from samerun.errors import as_shown

if TYPE_CHECKING:
    from rich.progress import Progress

STDOUT = ("-", "/dev/stdout")  # as the name of a file
BAR_WIDTH, NAME_WIDTH = 16, 24  # columns
REFRESH_INTERVAL = 0.1  # seconds between two drawings of a bar
LINE_INTERVAL = 10.0  # seconds between two lines of a log, at least
LINE_SHARE = 0.05  # of the time since the start: the next line comes after it


def say(*lines: str) -> None:
    """Prints lines to stdout, unless silenced. Warnings and errors go to stderr instead, and notes where
    stdout gets predictions."""
    for line in lines:
        if not Phase.quiet:
            print(as_shown(line), flush=True)
        elif Phase.notes_on_stderr and line.startswith("note "):
            print(as_shown(line), file=sys.stderr, flush=True)


def plain_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table with columns of equal widths, in which a Chinese character counts twice."""
    from rich.cells import cell_len, set_cell_size

    widths = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]
    lines = [map(set_cell_size, row, widths) for row in [header, *rows]]
    return ["  ".join(cells).rstrip() for cells in lines]


def number_text(value: Any) -> str:
    """A number in a table or a message: "-" for None, integers whole, others with four decimals, or with
    four digits where decimals would show little."""
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e5 else f"{value:.4g}"


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
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        encoding = getattr(getattr(sys, name), "encoding", "utf-8")
        raw = io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False))
        stream = io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class Phase:
    """A part of a run whose progress is shown: as a bar on stderr until the phase ends, if stdout and stderr
    are a terminal; else by ever fewer lines. Use it as a context manager; `update` counts.

    `total` may be unknown. Without a `unit` nothing is counted: a terminal shows the phase while it lasts, a
    log has one line if it is long.
    `done`: where a resumed run begins. Rates exclude earlier work and the time of nested phases.
    """

    quiet: ClassVar[bool] = False  # silences `say`, too (--log_level warning)
    notes_on_stderr: ClassVar[bool] = False  # although it is quiet
    running: ClassVar[list[Phase]] = []  # outermost first
    display: ClassVar[Progress | None] = None  # of all bars: a nested phase has its bar below the outer one
    first_began: ClassVar[float] = time.monotonic()
    last_line: ClassVar[float] = 0.0

    def __init__(
        self, name: str, unit: str = "", total: int | None = None, done: int = 0, shown: bool = True
    ) -> None:
        self.name, self.unit, self.total, self.done, self.first = name, unit, total, done, done
        self.shown = shown and not Phase.quiet
        self.note = ""
        self.process = os.getpid()
        self.bar: Any = None
        self.timer: threading.Timer | None = None
        self.drawn = 0.0  # when the bar was last drawn

    def start(self) -> Phase:
        self.started = self.began = time.monotonic()
        Phase.running.append(self)
        self.update(0)
        if self.shown and not self.unit and self.bar is None:
            text = f"{self.name:<14} still running after {LINE_INTERVAL:g} seconds"
            self.timer = threading.Timer(LINE_INTERVAL, say, [text])
            self.timer.daemon = True
            self.timer.start()
        return self

    __enter__ = start

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the phase. A second call does nothing."""
        if self.timer is not None:
            self.timer.cancel()
        if self in Phase.running:
            Phase.running.remove(self)
            if Phase.running:
                Phase.running[-1].started += time.monotonic() - self.began
            if self.bar is not None:
                Phase.display.remove_task(self.bar)
            if Phase.display is not None and not Phase.running:
                Phase.display.stop()
                Phase.display = None

    def update(self, number: int = 1, note: str | None = None) -> None:
        """Counts `number` more units. `note`: a text to show in place of the rate, such as a loss."""
        self.done += number
        self.note = self.note if note is None else note
        if not self.shown:
            return
        now, last_line = time.monotonic(), max(self.began, Phase.last_line)
        # Lines in a pipe (`| tee run.log`) would appear inside bars. Only the process that made the phase
        # draws its bar; forked workers print lines.
        if sys.stderr.isatty() and sys.stdout.isatty() and os.getpid() == self.process:
            if now - self.drawn >= REFRESH_INTERVAL:
                self.drawn = now
                self._draw()
        elif self.unit and now - last_line >= max(LINE_INTERVAL, LINE_SHARE * (now - Phase.first_began)):
            Phase.last_line = now
            say(f"{self.name:<14} {self.describe()}")

    @property
    def rate(self) -> float:
        """Units per second; 0 at the start."""
        seconds, done = time.monotonic() - self.started, self.done - self.first
        return done / seconds if seconds > 0 else 0.0

    def describe(self) -> str:
        """The count, the note or the rate, and the remaining time; "" if nothing is counted."""
        if not self.unit:
            return ""
        total = f" of {self.total:,}" if self.total else ""
        parts = [f"{self.done:,}{total} {self.unit}"]
        if self.note or self.rate:
            parts.append(self.note or f"{self.rate:,.{0 if self.rate >= 10 else 2}f} {self.unit}/s")
        if self.total and self.rate:
            seconds = round((self.total - self.done) / self.rate)
            parts.append(f"{timedelta(seconds=seconds)} left")
        return ", ".join(parts)

    def _draw(self) -> None:
        if Phase.display is None:
            from rich.console import Console  # only a terminal shows bars
            from rich.progress import BarColumn, Progress, TextColumn

            console, bar = Console(stderr=True, highlight=False), BarColumn(BAR_WIDTH)
            text = TextColumn("{task.description}", style="default", markup=False)
            # No refresh thread: worker processes are forked.
            Phase.display = Progress(bar, text, console=console, auto_refresh=False, transient=True)
            Phase.display.start()
            console.show_cursor(True)  # a killed process could not restore it
        # A long path must not push the count out of the line.
        name = self.name if len(self.name) <= NAME_WIDTH else f"…{self.name[1 - NAME_WIDTH :]}"
        text = f"{name} {self.describe()}"
        if self.bar is None:
            self.bar = Phase.display.add_task(text, total=self.total)
        Phase.display.update(self.bar, completed=self.done, description=text, refresh=True)


def counted(items: Iterable[Any], name: str, unit: str, total: int | None = None) -> Iterator[Any]:
    """Yields the items and shows their progress."""
    with Phase(name, unit, total) as phase:
        for item in items:
            yield item
            phase.update()
