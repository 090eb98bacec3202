"""Progress of the phases of a run: bars on a terminal, occasional lines in a log.

Bars need stdout and stderr on a terminal. They go to stderr and vanish when their phase ends. Otherwise a
phase prints a line per tenth of its work, or per minute if a hundredth is done, so at most about a hundred
lines. A run may have many phases, such as evaluations: after every 50 lines, lines become half as frequent.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from samerun.output.console import NAME_WIDTH, is_quiet, say

if TYPE_CHECKING:
    from rich.progress import Progress

BAR_DELAY = 1.0  # seconds before a phase gets a bar
REFRESH_INTERVAL = 0.1  # seconds
MIN_LINE_INTERVAL = 10.0  # seconds between two log lines, each after a tenth of the work
SLOW_LINE_INTERVAL = 60.0  # seconds between two log lines, each after a hundredth of the work

LINES_PER_HALVING = 50

_lines_printed = 0  # of all phases
_display: Progress | None = None  # shared by all bars: a nested phase has its bar below the outer one
_phases: list[Phase] = []  # running phases, outermost first


class Phase:
    """A part of a run with a progress bar. Use it as a context manager; `update` counts.

    `total` may be unknown. Without a `unit` nothing is counted: a terminal shows the phase while it lasts.
    `done`: where a resumed run begins. Rates exclude earlier work and the time of nested phases.
    """

    def __init__(
        self, name: str, unit: str = "", total: int | None = None, done: int = 0, shown: bool = True
    ) -> None:
        self.name, self.unit, self.total, self.done, self.first = name, unit, total, done, done
        self.shown = shown and not is_quiet()
        self.note = ""
        self.process = os.getpid()
        self.bar: Any = None

    def start(self) -> Phase:
        self.started = self.begun = self.refreshed = self.logged = time.monotonic()
        self.lines, self.done_when_logged = 0, self.done
        _phases.append(self)
        if not self.unit:
            self.update(0)
        return self

    def stop(self) -> None:
        """Ends the phase. A second call does nothing."""
        global _display
        if self not in _phases:
            return
        _phases.remove(self)
        if _phases:
            _phases[-1].started += time.monotonic() - self.begun
        if self.bar is not None:
            _display.remove_task(self.bar)
            self.bar = None
        if not _phases and _display is not None:
            _display.stop()
            _display = None

    def __enter__(self) -> Phase:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def update(self, number: int = 1, note: str | None = None) -> None:
        """Counts `number` more units. `note`: a text to show in place of the rate, such as a loss."""
        global _lines_printed
        self.done += number
        self.note = self.note if note is None else note
        if not self.shown:
            return
        # Lines in a pipe (`| tee run.log`) would appear inside bars. Only the process that made the phase
        # draws its bar; forked workers print lines.
        if sys.stderr.isatty() and sys.stdout.isatty() and os.getpid() == self.process:
            self._draw()
        elif self.unit and self._line_is_due():
            _lines_printed += 1
            self.logged, self.done_when_logged, self.lines = time.monotonic(), self.done, self.lines + 1
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
        global _display
        now = time.monotonic()
        if self.unit and (now - self.begun < BAR_DELAY or now - self.refreshed < REFRESH_INTERVAL):
            return
        self.refreshed = now
        if _display is None:
            from rich.console import Console  # only a terminal shows bars
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            # No refresh thread: worker processes are forked.
            _display = Progress(
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}", style="default", table_column=Column(no_wrap=True)),
                console=Console(stderr=True, highlight=False),
                auto_refresh=False,
                transient=True,
                expand=True,
            )
            _display.start()
            _display.console.show_cursor(True)  # a killed process could not restore it
        state = {"completed": self.done, "text": "  ".join(part for part in self._parts("/") if part)}
        if self.bar is None:
            self.bar = _display.add_task(
                _shortened(self.name, _display.console.width // 3), total=self.total, **state
            )
        _display.update(self.bar, **state, refresh=True)

    def _line_is_due(self) -> bool:
        waited = (time.monotonic() - self.logged) / 2 ** (_lines_printed // LINES_PER_HALVING)
        if self.total is None:
            return waited >= SLOW_LINE_INTERVAL * 2**self.lines
        tenth = self.done * 10 // self.total > self.done_when_logged * 10 // self.total
        hundredth = self.done - self.done_when_logged >= self.total / 100
        return (tenth and waited >= MIN_LINE_INTERVAL) or (hundredth and waited >= SLOW_LINE_INTERVAL)


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
