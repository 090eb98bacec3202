"""Requests to stop: a signal, a launcher that is gone, the end of --max_train_time. Level 1.

Signals are read by a thread, from the pipe that Python's C-level handler writes to. A handler written in Python would run in
the main thread only, which may be blocked in a collective that no other process joins any more.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from finetune.errors import EXIT_STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A terminal and Slurm signal every process, and the launcher then passes it on: one request that comes twice.
SAME_REQUEST_SECONDS = 2.0
LOOK_SECONDS = 1.0  # how often a process looks whether its launcher is still there

_started = 0.0
_reason: str | None = None
_since = 0.0
_deadline: tuple[float, str] | None = None
_exit_code: int | None = EXIT_STOPPED  # a request ends the process at once with this code; None: it waits for a boundary
_said = False
_before_end: list[Callable[[str], None]] = []
_ancestors: tuple[int, ...] = ()
_generations = 0
_listening = False


@contextlib.contextmanager
def listen() -> Iterator[None]:
    """Takes SIGTERM, SIGUSR1 and SIGINT as requests to stop while the context lasts. Main thread only.

    Outside of a training loop (see `defer`) there is nothing to save, and a request ends the process at once with exit code
    75. In one, the first request waits for the loop to look; a second ends the process at once with 128 + the signal. Inside
    another such context it does nothing.
    """
    global _started, _ancestors, _listening
    if _listening:
        yield
        return
    _listening = True
    _forks_let_go()
    _reset()
    _started, _ancestors = time.monotonic(), tuple(_line_of_descent(2))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    closed = threading.Event()
    thread = threading.Thread(target=_watch, args=(reading, closed), name="requests to stop", daemon=True)
    before = {number: signal.signal(number, _nothing) for number in SIGNALS}
    for number in SIGNALS:
        signal.siginterrupt(number, False)  # system calls of the libraries go on
    old_pipe = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_pipe)
        for number, handler in before.items():
            signal.signal(number, handler)
        closed.set()
        os.write(writing, b"\0")
        thread.join()
        os.close(reading)
        os.close(writing)
        _listening = False
        _reset()


def requested() -> str | None:
    """Why this process was asked to stop, or None. Other processes may have been asked instead: agree before acting on it."""
    if _reason is None and _deadline is not None and time.monotonic() >= _deadline[0]:
        return _deadline[1]
    return _reason


def defer() -> None:
    """From here on a request waits until someone looks at `requested`."""
    global _exit_code
    _exit_code = None


def end_with(code: int, said: bool = False) -> None:
    """From here on a request ends the process at once with this exit code: there is nothing to be saved. `said`: why the run
    ends has been told already. With the code of a request, so does one that nobody has looked at yet."""
    global _exit_code, _said
    _exit_code, _said = code, said
    if code == EXIT_STOPPED and not said and _reason is not None:
        _end(f"{_reason}: ended at once, there was nothing to be saved", code)


def limit(seconds: float | None) -> None:
    """Asks for a stop so many seconds after `listen` began."""
    global _deadline
    _deadline = None if seconds is None else (_started + seconds, f"--max_train_time {seconds:g} is over")


def watch_launcher(generations: int) -> None:
    """Takes the death of this process's parent (1) or of its parent's parent as well (2) for a request."""
    global _generations
    _generations = generations


def on_end(say: Callable[[str], None]) -> None:
    """Has `say` called with the reason before a request ends the process at once, after whatever was given before."""
    _before_end.append(say)


def leave(code: int) -> None:
    """Ends the process without tearing it down, and its forked workers, which may ignore signals, with it."""
    for pid in _forked():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(code)


def ignore_signals(_worker: int = 0) -> None:
    """For a DataLoader's workers: a signal to the whole process group is their parent's business."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _reset() -> None:
    global _reason, _since, _deadline, _generations
    _reason, _since, _deadline, _generations = None, 0.0, None, 0
    _before_end.clear()
    end_with(EXIT_STOPPED)


def _nothing(*_: object) -> None:
    """A handler must exist for the pipe to be written."""


def _watch(pipe: int, closed: threading.Event) -> None:
    while not closed.is_set():
        readable, _, _ = select.select([pipe], [], [], LOOK_SECONDS)
        for number in os.read(pipe, 64) if readable else b"":
            if number in SIGNALS:  # libraries handle others, SIGCHLD among them
                _heard(signal.Signals(number))
        if _generations and _reason is None and _orphaned():
            _request("the launcher is gone")


def _heard(number: signal.Signals) -> None:
    if _reason is None or _exit_code is not None:
        _request(number.name)
    elif time.monotonic() - _since > SAME_REQUEST_SECONDS:
        _end(f"{number.name} came after {_reason}: ended at once, nothing was saved since the last checkpoint", 128 + number)


def _request(why: str) -> None:
    global _reason, _since
    if _exit_code is not None:
        _end(f"{why}: ended at once, there was nothing to be saved", _exit_code)
    _reason, _since = why, time.monotonic()


def _end(why: str, code: int) -> None:
    for say in () if _said else _before_end:
        with contextlib.suppress(Exception):
            say(why)
    if os.environ.get("RANK", "0") == "0" and not _said:
        with contextlib.suppress(OSError):
            os.write(sys.__stderr__.fileno(), f"stopped: {why}\n".encode())
    leave(code)


def _orphaned() -> bool:
    """Whether one of the watched ancestors is not what it was when the process began: who loses a parent gets another."""
    watched = _ancestors[:_generations]
    return tuple(_line_of_descent(len(watched))) != watched


def _line_of_descent(generations: int) -> list[int]:
    """The process ids of the parent, its parent, and so on; fewer where they cannot be read."""
    line = [os.getppid()]
    while len(line) < generations:
        try:
            # The name, in parentheses, may hold anything; the parent's id is the second field behind it.
            fields = Path(f"/proc/{line[-1]}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            break
        line.append(int(fields[1]))
    return line


def _forked() -> list[int]:
    """The children that run this process's own command: workers of a DataLoader or of tokenization."""
    try:
        tasks = Path("/proc/self/task").glob("*/children")
        children = [int(pid) for file in tasks for pid in file.read_text().split()]
        mine = Path("/proc/self/cmdline").read_bytes()
        return [pid for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes() == mine]
    except OSError:
        return []


@functools.cache
def _forks_let_go() -> None:
    """Sees to it that a forked worker neither writes into its parent's pipe nor, being ended by who forked it, goes on."""
    # A signal that comes between the fork and the worker's first step waits until the worker has its own handlers.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS),
        after_in_child=_in_forked_child,
    )


def _in_forked_child() -> None:
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if signal.getsignal(number) is _nothing:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
