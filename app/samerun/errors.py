"""Exceptions that end a run, and their exit codes."""

import contextlib
import difflib
import errno
import os
import re
import socket
from collections.abc import Iterator, Sequence

EXIT_BAD_INPUT = 2
EXIT_TRAINING_FAILED = 3
EXIT_LOST = 69  # EX_UNAVAILABLE: another process is gone or hangs, which a new start may mend
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h, "try again later": schedulers requeue the job
SHOWN = 20  # problems in one message
# Characters that break lines or cannot be printed; names of files and columns may contain them.
CONTROL = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

SHOWN_AS: dict[str, str] = {}  # paths of copies, and what messages call them


class InputError(Exception):
    """Bad input or configuration, detected before any file is changed. Ends the job with exit code 2.

    Each problem is one line: what is wrong, where (file, row, field), what to do. All problems of a pass are
    reported together.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, *problems: str):
        shown = map(as_shown, dict.fromkeys(problems))
        self.problems = [CONTROL.sub(lambda match: ascii(match[0])[1:-1], problem) for problem in shown]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple:
        """Pickled, because all processes raise the error of rank 0."""
        return type(self), tuple(self.problems)


def as_shown(message: str) -> str:
    """The message with the names of `SHOWN_AS`."""
    for path, name in SHOWN_AS.items():
        message = message.replace(path, name)
    return message


@contextlib.contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Adds the problems of an `InputError` to `problems`, so that later ones are found too."""
    try:
        yield
    except InputError as error:
        problems += error.problems


def raise_problems(problems: Sequence[str], *advice: str) -> None:
    """Raises `InputError` with the first `SHOWN` problems and with `advice`, unless there are no problems."""
    if problems:
        raise InputError(*problems[:SHOWN], *more(len(problems)), *advice)


class TrainingError(Exception):
    """Training failed: non-finite loss, out of memory, a full disk. Ends the job with exit code 3."""

    exit_code = EXIT_TRAINING_FAILED


class StopRequested(Exception):  # noqa: N818 - not an error
    """The job stops on request after saving a checkpoint. Ends the job with exit code 75."""

    exit_code = EXIT_STOPPED


def is_out_of_space(error: BaseException) -> bool:
    """Whether the disk is full, a quota is exceeded, or a file exceeds `ulimit -f`. Native libraries report
    these as texts."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(error, "errno", None) in codes or any(os.strerror(code) in str(error) for code in codes)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or this machine is out of memory."""
    if {"MemoryError", "OutOfMemoryError"} & {cls.__name__ for cls in type(error).__mro__}:
        return True
    # torch's CPU allocator and CUDA's libraries raise RuntimeError, a failed fork OSError, an import
    # ImportError or, without memory for that, SystemError.
    words = (
        "DefaultCPUAllocator",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        os.strerror(errno.ENOMEM),
        "failed to map segment",
        "error return without exception set",
    )
    by_onednn = str(error) == "could not create a primitive"  # "... primitive descriptor" is another one
    return by_onednn or getattr(error, "errno", None) == errno.ENOMEM or any(x in str(error) for x in words)


def in_short(error: BaseException) -> str:
    """The first line of an exception's message, or the exception's name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def where_different(first: str, second: str) -> tuple[str, str]:
    """80 characters of each text, around their first difference: long lists may differ at their end."""
    start = max(0, len(os.path.commonprefix([first, second])) - 40)  # noqa: RUF071 - of characters
    dots = "..." if start else ""
    return f"{dots}{first[start : start + 80]}", f"{dots}{second[start : start + 80]}"


def process_name() -> str:
    """The rank and the host of this process, for messages."""
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return f"rank {rank} of {size} ({socket.gethostname()})"


def more(count: int) -> list[str]:
    """A last line for an error with more than `SHOWN` problems: "... and 5 more"."""
    return [f"... and {count - SHOWN} more"] if count > SHOWN else []


def not_found(what: str, name: str, existing: Sequence[str]) -> str:
    """The message for a missing column or field. `what`: "column" or "field"."""
    near = nearest(name, existing)
    hint = f"did you mean {quoted(near)}? Rename it" if near else "rename one of them"
    names = listed(existing) or "none"
    return (
        f"{what} {quoted(name)} not found; found: {names}; {hint} or pass its name with the "
        "--..._column argument"
    )


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The most similar one of `names`, ignoring case and outer spaces; None if none is similar."""
    folded = {other.strip().casefold(): other for other in names}
    close = difflib.get_close_matches(name, names, n=1)
    return folded.get(name.strip().casefold()) or (close[0] if close else None)


def listed(names: Sequence[str]) -> str:
    """At most ten names separated by commas; unusual ones in quotes."""
    is_plain = [name.isprintable() and name == name.strip() and 0 < len(name) <= 40 for name in names[:10]]
    shown = [name if plain else quoted(name) for name, plain in zip(names, is_plain, strict=False)]
    return ", ".join(shown) + (f", ... {len(names)} in all" if len(names) > 10 else "")


def quoted(text: str) -> str:
    """A text in quotes, cut to 40 characters."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def described(value: object) -> str:
    """A cell of the wrong type, with its type; "missing" for None."""
    if value is None:
        return "missing"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
