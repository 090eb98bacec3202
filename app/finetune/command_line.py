"""A task script's arguments, read before torch is imported: --help and wrong arguments are answered at once."""

from __future__ import annotations

import contextlib
import sys
from typing import TypeVar

from finetune import garbage_collection
from finetune.arguments.parsing import names_of, parse, validate
from finetune.arguments.standard_input import with_standard_input
from finetune.launching import host_settings, signals
from finetune.launching.shutdown import failures_end_the_job
from finetune.output.console import be_quiet, survive_a_lost_console

T = TypeVar("T")
_until_exit = contextlib.ExitStack()


def prepare_process() -> None:
    """What must be set before torch is imported."""
    survive_a_lost_console()
    host_settings.prepare()
    garbage_collection.begin()


def read_arguments(cls: type[T], description: str) -> T:
    """The command line as `cls`, a dataclass of argument groups. Ends the process if anything is wrong with it."""
    prepare_process()
    _until_exit.enter_context(signals.listen())  # from here on, also while libraries are imported
    with failures_end_the_job(debug="--debug" in sys.argv):
        arguments = parse(cls, description=description)
        validate(arguments)
        if getattr(arguments, "quiet", False):
            be_quiet()
        arguments = with_standard_input(arguments, names_of(arguments, reads=True))
    return arguments
