"""Requests to stop: a signal, a launcher that is gone, the end of --max_train_time.

A thread reads signals from the pipe that Python's C-level handler writes to. A handler written in Python would run in the main
thread only, which may be blocked in a collective that no other process enters any more.
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

import psutil

from finetune.errors import EXIT_STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # the last: the terminal is closed
# A terminal and Slurm signal every process, and the launcher then passes it on: one request that comes twice.
SAME_REQUEST_SECONDS = 2.0
NOTHING_TO_SAVE = "there was nothing to be saved"
POLL_SECONDS = 1.0  # between two checks whether the launcher is still there

_started = 0.0
_reason: str | None = None
_requested_at = 0.0
_deadline: tuple[float, str] | None = None
_exit_code: int | None = EXIT_STOPPED  # a request ends the process at once with this code; None: it waits for the training loop
_reported = False
_at_stop = NOTHING_TO_SAVE
_callbacks: list[Callable[[str], None]] = []
_ancestors: tuple[int, ...] = ()
_generations = 0
_listening_process: int | None = None  # a forked process does not listen by its parent's thread


@contextlib.contextmanager
def listen() -> Iterator[None]:
    """Treats SIGTERM, SIGUSR1, SIGINT and SIGHUP as requests to stop; not a SIGHUP that `nohup` has this process ignore. Main
    thread only.

    Outside of a training loop (see `defer`) there is nothing to save, and a request ends the process at once with exit code
    75. In a training loop, the first request waits for the loop to look; a second ends the process with 128 + the signal.
    Inside another such context it does nothing.
    """
    global _started, _ancestors, _listening_process
    if _listening_process == os.getpid():
        yield
        return
    _listening_process = os.getpid()
    _separate_forks()
    _reset()
    _started, _ancestors = time.monotonic(), _line_of_descent(2)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    closed = threading.Event()
    thread = threading.Thread(target=_watch, args=(reading, closed), name="requests to stop", daemon=True)
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heard = [number for number in SIGNALS if not (under_nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, _write_to_pipe) for number in heard}
    for number in heard:
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
        _listening_process = None
        _reset()


def requested() -> str | None:
    """Why this process was requested to stop, or None. Other processes may be the requested ones: agree before acting on it."""
    if _reason is None and _deadline is not None and time.monotonic() >= _deadline[0]:
        return _deadline[1]
    return _reason


def defer() -> None:
    """From here on a request waits until the training loop looks at `requested`."""
    global _exit_code
    _exit_code = None


def exit_with(code: int, reported: bool = False) -> None:
    """From here on a request ends the process at once with this exit code: there is nothing to save. `reported`: the reason
    for the end has been printed. With EXIT_STOPPED, so does a request that the training loop has not looked at."""
    global _exit_code, _reported
    _exit_code, _reported = code, reported
    if code == EXIT_STOPPED and not reported and _reason is not None:
        _exit(f"{_reason}: ended at once, {_at_stop}", code)


def says_at_stop(words: str) -> None:
    """What a request says from here on when it ends the process at once, in place of that there was nothing to be saved."""
    global _at_stop
    _at_stop = words


def limit(seconds: float | None) -> None:
    """Requests a stop so many seconds after `listen` began."""
    global _deadline
    _deadline = None if seconds is None else (_started + seconds, f"--max_train_time {seconds:g} is over")


def watch_launcher(generations: int) -> None:
    """Takes the death of this process's parent (1) or of its parent's parent as well (2) for a request."""
    global _generations
    _generations = generations


def on_end(callback: Callable[[str], None]) -> None:
    """Calls `callback` with the reason before a request ends the process at once, after the callbacks registered before."""
    _callbacks.append(callback)


def exit_now(code: int) -> None:
    """Ends the process without tearing it down, and with it the children that run its own command: workers of a DataLoader or
    of tokenization, which may ignore signals."""
    try:
        own = psutil.Process()
        for child in own.children():
            with contextlib.suppress(psutil.Error):
                if child.cmdline() == own.cmdline():
                    child.kill()
    finally:
        os._exit(code)


def ignore_signals(_worker: int = 0) -> None:
    """For a DataLoader's workers: a signal to the whole process group is their parent's business."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _reset() -> None:
    global _reason, _requested_at, _deadline, _generations
    _reason, _requested_at, _deadline, _generations = None, 0.0, None, 0
    _callbacks.clear()
    says_at_stop(NOTHING_TO_SAVE)
    exit_with(EXIT_STOPPED)


def _write_to_pipe(*_: object) -> None:
    """Does nothing: Python writes to the pipe for every signal that has a handler."""


def _watch(pipe: int, closed: threading.Event) -> None:
    while not closed.is_set():
        readable, _, _ = select.select([pipe], [], [], POLL_SECONDS)
        for number in os.read(pipe, 64) if readable else b"":
            if number in SIGNALS:  # libraries handle others, SIGCHLD among them
                _receive(signal.Signals(number))
        if _generations and _reason is None and _line_of_descent(_generations) != _ancestors[:_generations]:
            _request("the launcher is gone")  # a process that loses its parent gets another


def _receive(number: signal.Signals) -> None:
    if _reason is None or _exit_code is not None:
        _request(number.name)
    elif time.monotonic() - _requested_at > SAME_REQUEST_SECONDS:
        _exit(f"{number.name} came after {_reason}: ended at once, nothing was saved since the last checkpoint", 128 + number)


def _request(reason: str) -> None:
    global _reason, _requested_at
    if _exit_code is not None:
        _exit(f"{reason}: ended at once, {_at_stop}", _exit_code)
    _reason, _requested_at = reason, time.monotonic()


def _exit(reason: str, code: int) -> None:
    if not _reported:
        for callback in _callbacks:
            with contextlib.suppress(Exception):
                callback(reason)
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(sys.__stderr__.fileno(), f"stopped: {reason}\n".encode())
    exit_now(code)


def _line_of_descent(generations: int) -> tuple[int, ...]:
    """The process ids of the parent, its parent, and so on; fewer where they cannot be read."""
    line = [os.getppid()]
    with contextlib.suppress(psutil.Error):
        while len(line) < generations:
            # Not `Process.parents`, which compares start times: they move when the clock is set.
            line.append(psutil.Process(line[-1]).ppid())
    return tuple(line)


@functools.cache
def _separate_forks() -> None:
    """Keeps a forked worker from writing into its parent's pipe and from surviving the signals of its parent."""
    # A signal that comes between the fork and the worker's first step waits until the worker has its own handlers.
    os.register_at_fork(
        before=functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS),
        after_in_parent=functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, SIGNALS),
        after_in_child=_restore_handlers,
    )


def _restore_handlers() -> None:
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if signal.getsignal(number) is _write_to_pipe:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
