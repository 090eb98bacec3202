"""Reads the arguments of a script before torch is imported, so that --help and errors appear at once."""

import atexit
import contextlib
import ctypes
import dataclasses
import json
import os
import platform
import re
import shutil
import sys
from typing import Any, TypeVar

import psutil

from samerun import signals
from samerun.console import STDOUT, Phase, say, survive_a_lost_console
from samerun.errors import SHOWN_AS, InputError
from samerun.files import temporary_folder
from samerun.kernels import is_zen5
from samerun.parsing import SpaceSeparated, names_of, parse, validate, values_of
from samerun.signals import failures_end_the_job

T = TypeVar("T")
STANDARD_INPUT = ("-", "/dev/stdin")
HEAD = 2**16  # bytes of standard input that decide the kind of file
# Iterations for which a thread of OpenMP spins before it sleeps, beside other programs. The default of some
# milliseconds takes time from them and waits for threads that they keep from running.
SPINS = "2000"
QUIET = 12  # percent of the machine's CPUs up to which other programs leave that default
OPENBLAS_SPINS = "6"  # 2 ** 6 cycles: its threads take turns with OpenMP's
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
# The process keeps freed memory up to this size for the next step: the kernel need not clear new pages.
KEPT_BYTES = 2**30
# torch and oneDNN each keep 1,024 bf16 kernels with their buffers, and batches of texts have ever new shapes.
# The layers of a model share a shape (docs/memory.md, "Memory on a CPU").
KEPT_KERNELS = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "64")
_exit_stack = contextlib.ExitStack()
# Before the interpreter is torn down: Python 3.13 then waits for ever for a thread that listens to signals.
atexit.register(_exit_stack.close)


def set_up_host() -> None:
    """Settings of OpenMP, OpenBLAS and malloc that must precede the import of torch, made only where the user
    made none. Takes a tenth of a second, to see whether other programs compute.

    OpenMP threads that spin only for a short time are slower on an idle machine and much faster when other
    programs compute; on Zen 5, OpenBLAS's own threads do. Numbers: benchmarks/notes.md, "Threads that wait"
    and "Memory on a CPU".
    """
    one_thread = os.environ.get("OMP_NUM_THREADS") == "1"
    if not one_thread and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        busy = os.environ.get("LOCAL_WORLD_SIZE", "1") != "1" or is_zen5()
        with contextlib.suppress(OSError):  # of a sandbox without /proc/stat
            busy = busy or psutil.cpu_percent(0.1) > QUIET
        if busy:
            os.environ["GOMP_SPINCOUNT"] = SPINS
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", OPENBLAS_SPINS)
    set_by_user = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if not set_by_user and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(option, KEPT_BYTES)


def read_arguments(cls: type[T], description: str) -> T:
    """Parses the command line into `cls`, a dataclass of argument groups. Errors end the process."""
    survive_a_lost_console()
    _exit_stack.enter_context(signals.listen())  # until the process exits, including the imports of libraries
    with failures_end_the_job(debug=shows_traces(sys.argv)):
        notes: list[str] = []
        arguments = parse(cls, description=description, notes=notes)
        validate(arguments)
        set_up_host()
        if hasattr(arguments, "text_column"):
            os.environ.update(KEPT_KERNELS | os.environ)
        set_quiet(arguments)
        if os.environ.get("RANK", "0") == "0":
            say(*(f"note           {note}" for note in notes))
        return with_standard_input(arguments, names_of(arguments, reads=True))


def set_quiet(arguments: Any) -> None:
    """Prints warnings and errors only, if requested, or notes on stderr beside predictions on stdout."""
    to_stdout = arguments.predictions_file in STDOUT and not arguments.modes.train
    Phase.notes_on_stderr = to_stdout and arguments.log_level != "warning"
    Phase.quiet = to_stdout or arguments.log_level == "warning"


def shows_traces(argv: list[str]) -> bool:
    """Whether a command asks for stack traces, before its arguments are parsed."""
    words = " ".join(argv).replace("=", " ").replace("-", "_")
    return "__log_level debug" in words


def with_standard_input(arguments: Any, names: list[str]) -> Any:
    """Copies standard input to a temporary file, because rows are read several times, and puts its path into
    the arguments: `cat new.csv | python app/classify.py --do_predict --test_file - ...`.

    `names`: the arguments that may name standard input. Content that begins with "{" is jsonl, with "[" json.
    Otherwise it is csv, or for --test_file of a text task, unless its first line names a column, a text on
    each line. Raises `InputError` if several arguments name it, or if there are several processes: only one
    would get it.
    """
    naming = [name for name, path in values_of(arguments, names) if path in STANDARD_INPUT]
    if not naming:
        return arguments
    if len(naming) > 1:
        both = " and ".join(f"--{name}" for name in naming)
        raise InputError(f"{both} are standard input; only one can be")
    (name,) = naming
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError(
            f"--{name} -: only one process gets standard input; write it to a file, or launch with python"
        )
    head = sys.stdin.buffer.read(HEAD)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    copy = _temporary_copy({b"{": "jsonl", b"[": "json"}.get(start, "csv"))
    with open(copy, "wb") as file:
        file.write(head)
        shutil.copyfileobj(sys.stdin.buffer, file)
    if copy.endswith(".csv") and start and name == "test_file" and hasattr(arguments, "text_column"):
        copy = _rows_of_lines(copy, arguments)
    if isinstance(paths := getattr(arguments, name), SpaceSeparated):
        copy = SpaceSeparated(copy if path in STANDARD_INPUT else path for path in paths)
    return dataclasses.replace(arguments, **{name: copy})


def _temporary_copy(kind: str) -> str:
    """The path of a temporary file, which messages call "standard input"."""
    path = str(temporary_folder("standard_input_") / f"standard_input.{kind}")
    SHOWN_AS[path] = "standard input"
    return path


def _rows_of_lines(path: str, arguments: Any) -> str:
    """Writes each line as the text of a row to a jsonl file and returns its path; that of the csv file if its
    first line names a column."""
    from samerun.data.files import text_lines

    column, encoding = arguments.text_column, arguments.encoding
    first = next((line for line in text_lines(path, encoding, None) if line.strip()), "")
    cells = {cell.strip(' "\n').casefold() for cell in re.split("[,;\t]", first)}
    values = (value for name, value in vars(arguments).items() if name.endswith("_column"))
    if cells & {value.casefold() for value in values if value}:
        return path
    rows = _temporary_copy("jsonl")
    with open(rows, "w", encoding=encoding) as file:
        for line in text_lines(path, encoding, None):
            file.write(json.dumps({column: line.removesuffix("\n")}) + "\n")
    say(f"note           standard input: a text on each line, as the first names no column {column}")
    return rows
