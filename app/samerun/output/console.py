"""Console output. It never fails, even if the console goes away (`| head`, a closed terminal or stdout, a
full disk)."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from typing import Any, TextIO

NAME_WIDTH = 15  # columns of the name that begins a line: "note           ..."

_quiet = False


class _LossyFile(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def say(*lines: str) -> None:
    """Prints lines to stdout, unless --quiet. Warnings and errors go to stderr instead.

    On a terminal, long lines are wrapped at words, and their continuations line up behind the 15 columns of a
    line's name.
    """
    if lines and not _quiet:
        if sys.stdout.isatty():
            lines = tuple(
                _wrapped(line, max(shutil.get_terminal_size().columns, 3 * NAME_WIDTH)) for line in lines
            )
        print(*lines, sep="\n", flush=True)


def _wrapped(line: str, width: int) -> str:
    indent = " " * NAME_WIDTH
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def be_quiet() -> None:
    """Silences `say` and progress (--quiet)."""
    global _quiet
    _quiet = True


def is_quiet() -> bool:
    return _quiet


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
