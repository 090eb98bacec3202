"""Progress of the phases of a run: a bar on a terminal, a line now and then in a log.

Bars go to stderr and vanish when their phase ends. A log gets a line per tenth of a phase or per minute, at most about a
hundred: a run of a week is not a book.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from finetune.output.console import is_quiet, say

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY = 1.0  # seconds that a phase must last to be shown on a terminal
BETWEEN_REFRESHES = 0.1  # seconds
BETWEEN_LINES = 10.0  # seconds at least between two lines of a log
A_LINE_AFTER = 60.0  # seconds after which a further hundredth of the work is worth a line

_display: Progress | None = None  # the one that all bars share: a phase inside another has its line below it
_phases: list[Phase] = []  # those that have begun, outermost first


class Phase:
    """A part of a run that takes time. Use it as a context; `update` counts what is done.

    `total` may be unknown. Without a `unit` there is nothing to count: a terminal shows the phase while it lasts. `done`: where
    a resumed run begins. Rates do not count what was done before, nor the time of phases inside this one.
    """

    def __init__(self, what: str, unit: str = "", total: int | None = None, done: int = 0, shown: bool = True) -> None:
        self.what, self.unit, self.total, self.done, self.first = what, unit, total, done, done
        self.shown = shown and not is_quiet()
        self.note = ""
        self.process = os.getpid()
        self.bar: Any = None

    def start(self) -> Phase:
        """Begins to count time."""
        self.started = self.begun = self.refreshed = self.said = time.monotonic()
        self.lines, self.done_when_said = 0, self.done
        _phases.append(self)
        if not self.unit:
            self.update(0)
        return self

    def stop(self) -> None:
        """Ends the phase; once more does nothing."""
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
        """Counts `number` more; `note`: what is to be said besides, as a loss."""
        self.done += number
        self.note = self.note if note is None else note
        if not self.shown:
            return
        # A bar belongs to one process: others that work for it write lines.
        if sys.stderr.isatty() and os.getpid() == self.process:
            self._draw()
        elif self.unit and self._line_is_due():
            self.said, self.done_when_said, self.lines = time.monotonic(), self.done, self.lines + 1
            say(f"{self.what:<15}{self.describe()}")

    @property
    def rate(self) -> float:
        """Units per second; 0 before there is anything to divide."""
        seconds, done = time.monotonic() - self.started, self.done - self.first
        return done / seconds if seconds > 0 else 0.0

    def describe(self) -> str:
        """What is done, what the phase's note says, the rate and the time that is left."""
        done, said, left = self._parts(" of ")
        return ", ".join(part for part in (f"{done} {self.unit}", said, left and f"{left} left") if part)

    def _parts(self, of: str) -> tuple[str, str, str]:
        """(what is done; the note, or else the rate; the time that is left)."""
        if not self.unit:
            return "", "", ""
        speed = f"{self.rate:,.{0 if self.rate >= 10 else 2}f} {self.unit}/s" if self.rate else ""
        left = _clock((self.total - self.done) / self.rate) if self.total and self.rate else ""
        return f"{self.done:,}{of}{self.total:,}" if self.total else f"{self.done:,}", self.note or speed, left

    def _draw(self) -> None:
        global _display
        now = time.monotonic()
        if self.unit and (now - self.begun < DELAY or now - self.refreshed < BETWEEN_REFRESHES):
            return
        self.refreshed = now
        if _display is None:
            from rich.console import Console  # only a terminal shows bars
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            # Not refreshed by a thread of its own: it would be copied into worker processes by a fork.
            _display = Progress(
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}", style="default", table_column=Column(no_wrap=True)),
                console=Console(stderr=True, highlight=False),
                auto_refresh=False,
                transient=True,
                expand=True,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=True,
            )
            _display.start()
            _display.console.show_cursor(True)  # a process that is killed leaves the terminal as it was
        state = {"completed": self.done, "text": "  ".join(part for part in self._parts("/") if part)}
        if self.bar is None:
            self.bar = _display.add_task(self.what, total=self.total, **state)
        _display.update(self.bar, **state, refresh=True)

    def _line_is_due(self) -> bool:
        waited = time.monotonic() - self.said
        if self.total is None:
            return waited >= A_LINE_AFTER * 2**self.lines
        tenth = self.done * 10 // self.total > self.done_when_said * 10 // self.total
        hundredth = self.done - self.done_when_said >= self.total / 100
        return (tenth and waited >= BETWEEN_LINES) or (hundredth and waited >= A_LINE_AFTER)


def counted(things: Iterable[Any], what: str, unit: str, total: int | None = None) -> Iterator[Any]:
    """The things, with progress that counts them."""
    with Phase(what, unit, total) as phase:
        for thing in things:
            yield thing
            phase.update()


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
