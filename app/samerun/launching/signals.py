"""Requests to stop: a signal, the death of the launcher, the end of --max_train_time.

A thread reads signals from the pipe that Python's C-level handler writes to. A Python handler would run in
the main thread, which may be blocked in a collective.
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

from samerun.errors import EXIT_STOPPED
from samerun.output.temporary import remove_temporary_folders

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal is closed
# A terminal and Slurm signal every process, and the launcher forwards the signal: one request arrives twice.
SAME_REQUEST_SECONDS = 2.0
NOTHING_TO_SAVE = "nothing to save"
POLL_SECONDS = 1.0  # between two checks of the launcher

_started = 0.0
_reason: str | None = None
_requested_at = 0.0
_deadline: tuple[float, str] | None = None  # (time, reason)
_exit_code: int | None = EXIT_STOPPED  # of an immediate stop; None: a request waits for the training loop
_reported = False
_stop_message = NOTHING_TO_SAVE
_callbacks: list[Callable[[str], None]] = []
_ancestors: tuple[int, ...] = ()
_generations = 0
_listening_process: int | None = None  # a forked process inherits the variables but not the thread


@contextlib.contextmanager
def listen() -> Iterator[None]:
    """Handles SIGTERM, SIGUSR1, SIGINT and SIGHUP (unless `nohup` ignores it) as requests to stop. Main
    thread only.

    Outside a training loop (see `defer`), a request stops the process at once with exit code 75. In a
    training loop, the first request waits for the loop to check `requested`; a second one ends the process
    with 128 + the signal. A nested call does nothing.
    """
    global _started, _ancestors, _listening_process
    if _listening_process == os.getpid():
        yield
        return
    _listening_process = os.getpid()
    _separate_forks()
    _reset()
    _started, _ancestors = time.monotonic(), _ancestor_ids(2)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    closed = threading.Event()
    thread = threading.Thread(target=_watch, args=(reading, closed), name="requests to stop", daemon=True)
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in SIGNALS if not (under_nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, _write_to_pipe) for number in handled}
    for number in handled:
        signal.siginterrupt(number, False)  # system calls of libraries are restarted
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
    """The reason why this process should stop, or None. Requests may reach single processes: agree before
    acting on one."""
    if _reason is None and _deadline is not None and time.monotonic() >= _deadline[0]:
        return _deadline[1]
    return _reason


def defer() -> None:
    """From now on a request waits until the training loop checks `requested`."""
    global _exit_code
    _exit_code = None


def exit_with(code: int, reported: bool = False) -> None:
    """From now on a request stops the process at once with this exit code. `reported`: the reason has been
    printed already.

    With EXIT_STOPPED, also acts on an earlier request that the training loop has not seen.
    """
    global _exit_code, _reported
    _exit_code, _reported = code, reported
    if code == EXIT_STOPPED and not reported and _reason is not None:
        _exit(f"{_reason}: ended at once, {_stop_message}", code)


def set_stop_message(message: str) -> None:
    """Replaces "nothing to save" in the message of an immediate stop."""
    global _stop_message
    _stop_message = message


def set_time_limit(seconds: float | None) -> None:
    """Requests a stop this many seconds after `listen` began."""
    global _deadline
    _deadline = None if seconds is None else (_started + seconds, f"--max_train_time {seconds:g} is over")


def watch_launcher(generations: int) -> None:
    """Requests a stop when this process's parent dies (1), or its parent or grandparent (2)."""
    global _generations
    _generations = generations


def on_immediate_stop(callback: Callable[[str], None]) -> None:
    """Calls `callback` with the reason before a request stops the process at once. Callbacks run in order of
    registration."""
    _callbacks.append(callback)


def exit_now(code: int) -> None:
    """Ends the process without cleanup, except of temporary folders. Kills its workers (children with its
    command line) first: they may ignore signals."""
    try:
        own = psutil.Process()
        for child in own.children():
            with contextlib.suppress(psutil.Error):
                if child.cmdline() == own.cmdline():
                    child.kill()
        remove_temporary_folders()
    finally:
        os._exit(code)


def ignore_signals(_worker: int = 0) -> None:
    """Initialises a DataLoader worker: its parent handles signals to the process group."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _reset() -> None:
    global _reason, _requested_at, _deadline, _generations
    _reason, _requested_at, _deadline, _generations = None, 0.0, None, 0
    _callbacks.clear()
    set_stop_message(NOTHING_TO_SAVE)
    exit_with(EXIT_STOPPED)


def _write_to_pipe(*_: object) -> None:
    """Does nothing. Python writes to the pipe for every signal that has a handler."""


def _watch(pipe: int, closed: threading.Event) -> None:
    while not closed.is_set():
        readable, _, _ = select.select([pipe], [], [], POLL_SECONDS)
        for number in os.read(pipe, 64) if readable else b"":
            if number in SIGNALS:  # libraries handle other signals, such as SIGCHLD
                _receive(signal.Signals(number))
        # A process that loses its parent gets another one.
        if _generations and _reason is None and _ancestor_ids(_generations) != _ancestors[:_generations]:
            _request("the launcher is gone")


def _receive(number: signal.Signals) -> None:
    if _reason is None or _exit_code is not None:
        _request(number.name)
    elif time.monotonic() - _requested_at > SAME_REQUEST_SECONDS:
        _exit(
            f"{number.name} came after {_reason}: ended at once, nothing was saved since the last checkpoint",
            128 + number,
        )


def _request(reason: str) -> None:
    global _reason, _requested_at
    if _exit_code is not None:
        _exit(f"{reason}: ended at once, {_stop_message}", _exit_code)
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


def _ancestor_ids(generations: int) -> tuple[int, ...]:
    """Process ids of the parent, grandparent and so on; fewer if they cannot be read."""
    ids = [os.getppid()]
    with contextlib.suppress(psutil.Error):
        while len(ids) < generations:
            # Not `Process.parents`: it compares start times, which change when the clock is set.
            ids.append(psutil.Process(ids[-1]).ppid())
    return tuple(ids)


@functools.cache
def _separate_forks() -> None:
    """Gives forked workers the default handlers. With ours, a worker would write into its parent's pipe and
    ignore SIGTERM."""
    # Signals between the fork and the worker's first step stay pending until the worker has its own handlers.
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
                signal.signal(
                    number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
