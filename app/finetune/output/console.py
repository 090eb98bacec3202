"""The console: what a run says on it, and that it may go away: a reader that has read enough (`| head`), a closed terminal, a
closed stdout, a full disk."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

_quiet = False


class _Lossy(io.FileIO):
    """A file whose text is lost where it cannot be written: no training ends because nobody reads what it says."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def say(*lines: str) -> None:
    """Prints lines for the reader of a run, unless it is to be quiet. Warnings and errors go to stderr instead."""
    if lines and not _quiet:
        print(*lines, sep="\n", flush=True)


def be_quiet() -> None:
    """From now on `say` and progress print nothing (--quiet)."""
    global _quiet
    _quiet = True


def is_quiet() -> bool:
    return _quiet


def survive_a_lost_console() -> None:
    """Makes printing never fail. A stream that is closed from the start leads nowhere, and its number is taken: the next file
    to be opened would get it, and whatever libraries print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
    sys.stdout = _lossy(sys.stdout, 1)
    sys.stderr = _lossy(sys.stderr, 2)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def _lossy(stream: TextIO | None, number: int) -> TextIO:
    if stream is not None:
        stream.flush()
    is_terminal = os.isatty(number)
    return io.TextIOWrapper(
        io.BufferedWriter(_Lossy(number, "w", closefd=False)),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=is_terminal or number == 2,
        write_through=getattr(stream, "write_through", False),
    )
