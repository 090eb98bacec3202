"""Exceptions that end a run, and their exit codes. Imports nothing of ours."""

import errno
import os
import re
import socket

EXIT_BAD_INPUT = 2
EXIT_TRAINING_FAILED = 3
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: "try again later", what schedulers requeue on
# Characters that break a line or cannot be printed; names of files and columns may contain them.
CONTROL = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class InputError(Exception):
    """Bad input or configuration, noticed before anything was harmed. Ends the job with exit code 2.

    Each problem is one line: what is wrong, where (file, row, field), what to do. All problems of one pass are reported
    together.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, *problems: str):
        self.problems = [CONTROL.sub(lambda match: ascii(match[0])[1:-1], problem) for problem in dict.fromkeys(problems)]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple:
        """Rank 0's is raised on every process."""
        return type(self), tuple(self.problems)


class TrainingError(Exception):
    """Training cannot go on: a non-finite loss, memory, a lost rank. Ends the job with exit code 3."""

    exit_code = EXIT_TRAINING_FAILED


class StopRequested(Exception):  # noqa: N818 - a request, no error
    """The job stops on request and has written a checkpoint. Ends the job with exit code 75."""

    exit_code = EXIT_STOPPED


def is_out_of_space(error: BaseException) -> bool:
    """Whether a file could not be written for want of room: a full disk, a quota, a limit on the size of files (`ulimit -f`).
    Libraries in other languages report it in words."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(error, "errno", None) in codes or any(os.strerror(code) in str(error) for code in codes)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was refused, that of a GPU or of this machine."""
    if isinstance(error, MemoryError) or any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return True
    # torch's allocator for CPUs raises a RuntimeError; a process that cannot be forked is an OSError.
    words = ("DefaultCPUAllocator", os.strerror(errno.ENOMEM))
    return getattr(error, "errno", None) == errno.ENOMEM or any(word in str(error) for word in words)


def in_short(error: BaseException) -> str:
    """An exception's first line, or its name if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def where() -> str:
    """Which process of the job this is, in words."""
    return f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')} ({socket.gethostname()})"
