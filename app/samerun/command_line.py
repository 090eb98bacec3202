"""Reads the arguments of a task script before torch is imported, so that --help and errors appear at once."""

from __future__ import annotations

import atexit
import contextlib
import sys
from typing import TypeVar

from samerun import host_settings, signals
from samerun.arguments.parsing import names_of, parse, validate
from samerun.arguments.standard_input import with_standard_input
from samerun.output.console import be_quiet, survive_a_lost_console
from samerun.signals import failures_end_the_job

T = TypeVar("T")
_exit_stack = contextlib.ExitStack()
# Before the interpreter is torn down: Python 3.13 then waits for ever for a thread that listens to signals.
atexit.register(_exit_stack.close)


def prepare_process() -> None:
    """Settings of the process that must precede the import of torch."""
    survive_a_lost_console()
    host_settings.prepare()


def read_arguments(cls: type[T], description: str) -> T:
    """Parses the command line into `cls`, a dataclass of argument groups. Errors end the process."""
    prepare_process()
    _exit_stack.enter_context(signals.listen())  # until the process exits, including the imports of libraries
    with failures_end_the_job(debug="--debug" in sys.argv):
        arguments = parse(cls, description=description)
        validate(arguments)
        if getattr(arguments, "quiet", False):
            be_quiet()
        arguments = with_standard_input(arguments, names_of(arguments, reads=True))
    return arguments
